"""The paper's algorithm: a population of networks as one matrix, rules that mix its rows, and soups of the members."""
