"""The pure scheduler: events in, effects out. Clock values are arguments; nothing here blocks, sends or sleeps."""
