# The same commands for those who type `make` first; the scripts do the work.
.PHONY: setup demo test bench

setup demo test bench:
	scripts/$@
