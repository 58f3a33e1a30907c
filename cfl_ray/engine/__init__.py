"""Local work of many clients inside one process."""
