"""Runs side by side, from their results alone: read, compare, warn, put into words, render. Never imports torch."""
