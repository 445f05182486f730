"""The local shell: the planner's actions carried out with processes on one machine, objects kept in one file."""
