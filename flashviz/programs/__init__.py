"""Tile programs: one file per algorithm, its actions and its loops."""
