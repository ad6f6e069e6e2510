"""Records of runs, and the code that makes `RESULTS.md` from them."""
