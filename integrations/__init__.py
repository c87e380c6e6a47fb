"""Plugins for frameworks that are configured by a file: Axolotl."""
