"""Checks of environment, cards, model folder, error text and configuration, each with its cause and its cure."""
