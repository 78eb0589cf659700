"""Instruments and lesson plumbing for the course *Mixed Precision, Hands On*.

Import the module you need, as in ``from amp_utils import formats``; nothing else is loaded.
"""
