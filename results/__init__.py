"""The evidence: records of runs, and what makes `RESULTS.md` of them."""
