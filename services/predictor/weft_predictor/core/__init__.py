"""Pure: values in, predictions out."""
