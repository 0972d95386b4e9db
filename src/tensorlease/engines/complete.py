"""Whether an update has brought all that a vLLM model's layers are made of.

vLLM loads a layer anew when all of it has come. Of a layer that has not, it takes what came and
leaves the rest as memory that nobody has written; one of which nothing came it keeps as it was.
Neither is said, so that it has to be looked for before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from .member import UpdateError

if TYPE_CHECKING:
    import torch

MOST_NAMED: Final = 5
"""Names in an error."""
NEVER_SENT: Final = {"q_scale", "k_scale", "v_scale", "prob_scale", "input_scale_ub"}
"""Parameters that vLLM has a value for where a checkpoint has none, as its own loader knows."""
EXACT: Final = "UnquantizedLinearMethod"
"""The layers whose parameters have exactly the elements that come; others may be padded."""


class Completeness:
    """What the layers of one model lack in one update.

    Args:
        model: It; its parameters are those that a checkpoint has, and have no memory until a
            layer has all of them. (As they are once `initialize_layerwise_reload` was called.)
        aliases: Sets of names of one parameter each, as they were before that.
    """

    def __init__(self, model: torch.nn.Module, aliases: Iterable[set[str]]) -> None:
        self._model: Final = model
        self._same: dict[str, set[str]] = {}
        for names in [*aliases, *aliases_of(model, by_memory=False)]:
            joined = set(names).union(*(self._same.get(name, ()) for name in names))
            self._same.update(dict.fromkeys(joined, joined))
        # The names of each layer's parameters.
        self._layers: dict[str, set[str]] = {}
        for path, module in model.named_modules():
            if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
                continue  # Quantised while it is loaded: its parameters are none that come.
            for name, parameter in module.named_parameters(path, recurse=False):
                if parameter.numel() and name.rpartition(".")[2] not in NEVER_SENT:
                    self._layers.setdefault(path, set()).add(name)
        self._loaded: set[str] | None = set()

    def loaded(self, names: object) -> None:
        """Takes what a model's `load_weights` has returned: names of parameters, or nothing."""
        if self._loaded is None or not isinstance(names, set | frozenset | list | tuple):
            self._loaded = None  # It does not say: then nothing is known.
            return
        for name in names:
            self._loaded |= self._same.get(name, {name})

    def lacking(self, *, subset: bool = False) -> list[str]:
        """Returns the parameters of which something is lacking, when all has come.

        Args:
            subset: Only some tensors were to come: whole layers may be without any.
        """
        if self._loaded is None:
            return []
        found: list[str] = []
        for path, names in self._layers.items():
            here = names & self._loaded
            if here or not subset:
                found += sorted(names - here)
            module = self._model.get_submodule(path)
            if type(getattr(module, "quant_method", None)).__name__ == EXACT:
                waits = {name for name, p in module.named_parameters(path, False) if p.is_meta}
                found += [f"{name} (in part)" for name in sorted(here & waits)]
        return found

    def require(self, *, subset: bool = False) -> None:
        """Raises `UpdateError` if something is lacking; see `lacking`."""
        if found := self.lacking(subset=subset):
            more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            raise UpdateError(
                f"nothing was sent for {', '.join(found[:MOST_NAMED])}{more}: publish all tensors of"
                " the model, under a checkpoint's names; or, on top of a version that had all,"
                " whole layers by subset="
            )


def aliases_of(model: torch.nn.Module, *, by_memory: bool = True) -> list[set[str]]:
    """Returns the names of each parameter that has several: by what it is, or by where it lies."""
    found: dict[object, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if by_memory and not parameter.numel():
            continue
        key = (parameter.data_ptr(), tuple(parameter.shape)) if by_memory else id(parameter)
        found.setdefault(key, set()).add(name)
    return [names for names in found.values() if len(names) > 1]
