"""What every process of Weft speaks about: values and the machine contract. Standard library only."""
