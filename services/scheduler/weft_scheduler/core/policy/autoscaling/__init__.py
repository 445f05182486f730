"""How many runners a pool wants, and which ones should go."""
