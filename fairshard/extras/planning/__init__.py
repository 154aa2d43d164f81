"""Plans: the cost of a wrapped model in memory and messages, before there is one."""
