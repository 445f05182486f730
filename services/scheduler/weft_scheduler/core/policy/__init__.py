"""What the scheduler decides by: each policy is a folder with its reasons, its index and a table of cases."""
