"""Comparisons with other engines. Run from the repository; no part of the installed package."""
