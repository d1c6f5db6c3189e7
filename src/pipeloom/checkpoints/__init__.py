"""Save a pipeline under the names of the whole model, and load it whatever the number of ranks."""

from pipeloom.checkpoints._files import saved, saved_values
from pipeloom.checkpoints._load import load
from pipeloom.checkpoints._save import save

__all__ = ["load", "save", "saved", "saved_values"]
