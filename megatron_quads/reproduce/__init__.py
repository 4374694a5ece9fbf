"""``quads reproduce``: the paper's findings at small scale, arm by arm, with tables that a CPU rebuilds from logs."""
