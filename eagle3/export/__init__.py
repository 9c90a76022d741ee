"""The drafter directory: written, read, held against what engines make of it, converted from and to other forms."""
