"""Generated from the .proto files beside this one; `make proto` writes it again, a test keeps it current."""
