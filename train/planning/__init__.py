"""What a run needs and where it fits: the machine, its memory, the time; the plan of a dry run."""
