"""Nets with one planted fault each, and healthy ones: what a diagnosis must catch, and what it must let pass."""

from .case import Case
from .faulty import FAULTY
from .healthy import HEALTHY

__all__ = ["FAULTY", "HEALTHY", "Case"]
