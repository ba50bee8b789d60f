"""The built-in length policies, one file each."""
