"""The paper's algorithm: a matrix `W` with one row per member, and averagings `W <- A W`.

Read it in this order. The matrix: `layout` (which columns hold which tensor), `binding` (a module's tensors in a row),
`group` (rows in one process or in several), `population`. The averaging: `mixing` (the small matrices `A`), `product`
(`W <- A W`, by PyTorch's operators or by `kernels`), `rules` (when, and with which `A`), `health`, `diagnostics`, and
`averager`, whose `step` puts them together. Last, `soups`: one network from all.
"""
