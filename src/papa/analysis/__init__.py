"""What members have in common: the similarity of their features, and the losses on the line between two of them."""
