"""Seeded intervals, paired tests, power and multiplicity. No torch."""
