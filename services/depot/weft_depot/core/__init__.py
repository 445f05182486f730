"""The depot's decisions: values in, values out."""
