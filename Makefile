# The same commands for those who type `make` first; the scripts do the work.
.PHONY: setup demo docs test bench

setup demo docs test bench:
	scripts/$@
