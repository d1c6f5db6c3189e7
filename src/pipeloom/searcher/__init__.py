"""From costs and a memory limit to the best schedule, with a bound that says how good it is."""

from pipeloom.searcher._held import rank_shares
from pipeloom.searcher._search import Found, search

__all__ = ["Found", "rank_shares", "search"]
