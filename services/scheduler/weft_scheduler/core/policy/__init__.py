"""The policies that the scheduler decides by: each is a folder with its reasons, its index and a table of cases."""
