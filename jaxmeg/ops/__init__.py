"""Numerical building blocks with their own derivatives; they know shapes, not models."""
