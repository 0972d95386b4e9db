"""What a worker is told before it works: hooks, and what versions are written to or given to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ..protocol.errors import ConfigError
from .agent import Agent
from .callback_sink import CallbackSink, Lacks, S, StageCallback
from .given import checked
from .hooks import A, R, require_callable
from .intake import Intake
from .loading import Loading
from .performer import Performer
from .pieces import Pieces
from .placement import NamedTensors
from .recorded import LoadWeights, RecordedLoad, WrittenTo
from .sink import AttachedTensors, Cast, Rename
from .together import Groups, groups_of
from .worker_core import WorkerCore


class WorkerSetup(Agent[WorkerCore]):
    """The part of a worker that is used before it works; see `WorkerAgent`."""

    _intake: Intake
    _performer: Performer

    def on_prepare(self, hook: R) -> R:
        """Has `hook(round)` called before a round's first byte is written: pause, wake weights.

        May be used as a decorator. What it raises puts the replica out of the round.

        Raises:
            ConfigError: It cannot be called so; as for the other hooks.
        """
        require_callable("on_prepare", hook, "round")
        self._performer.hooks.prepare.append(hook)
        return hook

    def on_commit(self, hook: R) -> R:
        """Has `hook(round)` called when the worker switches: post-process, reset caches, go on.

        What it raises leaves the replica torn: not current until a later round commits.
        """
        require_callable("on_commit", hook, "round")
        self._performer.hooks.commit.append(hook)
        return hook

    def on_abort(self, hook: A) -> A:
        """Has `hook(round, reason, torn)` called when a prepared round does not commit: go on.

        Exactly once for each round whose prepare hooks began and whose commit hooks did not.
        """
        require_callable("on_abort", hook, "round", "reason", "torn")
        self._performer.hooks.abort.append(hook)
        return hook

    def attach(
        self,
        named_tensors: NamedTensors,
        regions: Pieces | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        *,
        cast: Cast | None = None,
        together: Groups = (),
    ) -> AttachedTensors:
        """Sets the tensors that versions are written to, in place, and joins the channel.

        Args:
            named_tensors: A model, or names and tensors; DTensors say their region themselves. That
                a model has been given another parameter is noticed in each round.
            regions: For plain tensors that are pieces: global shape and start, or `RowBlocks`.
            rename: The channel's name for each own name; a name that a mapping lacks stays.
            strict: Whether a tensor that nobody offers keeps the worker out of rounds.
            cast: "worker": floating dtypes that differ from the trainers' are converted during the
                copy; without it they keep the worker out of rounds.
            together: Groups of names in the channel, a weight and its scale say: a group of which
                only a part comes puts the worker out of the round, and is not written.

        Raises:
            AttachError: A tensor cannot be written to; names it, why, and the way out.
            ConfigError: There are tensors already, none were given, or the worker has begun to work.
            NoBrokerError: There is no broker; says where it was looked for.
            RefusedError: The broker refuses: the place in the replica is taken, say.
        """
        self._check_here()
        if self._intake.has_loader:
            raise ConfigError(f"{self!r} has a loader, which has all that comes")
        if self._intake.attached is not None:
            raise ConfigError(f"{self!r} has its tensors already; make another worker for others")
        tensors = AttachedTensors(named_tensors, regions, rename, strict, cast)
        if not tensors.names:
            raise ConfigError(
                f"no tensors were given to attach to {self!r}: give a model, or names and tensors"
            )
        groups = groups_of(together)
        for name in groups:
            if name not in tensors.names:
                raise ConfigError(f"{name!r} is to come together with others, but is not attached")
        self._join(lambda: self._intake.attach(tensors, groups), lambda: self._intake.attach(None))
        return tensors

    def attend(self) -> None:
        """Joins the channel without tensors: for what leads the other members of a replica.

        Raises:
            ConfigError: There are tensors already, or the worker has begun to work.
            NoBrokerError, RefusedError: As for `attach`.
        """
        self._check_here()
        if self._intake.attached is not None or self._intake.sink is not None:
            raise ConfigError(f"{self!r} takes tensors already: it takes part in rounds by that")
        nothing = AttachedTensors({})
        self._join(lambda: self._intake.attach(nothing), lambda: self._intake.attach(None))

    def on_stage(
        self,
        callback: S,
        names: Iterable[str] | None = None,
        *,
        strict: bool = True,
        together: Groups = (),
        recorded: RecordedLoad | None = None,
        lacks: Lacks | None = None,
    ) -> S:
        """Has `callback(round, tensors)` called for each batch, and joins the channel.

            worker.on_stage(lambda round, tensors: model.load_weights(tensors))

        `tensors` are (name, tensor) pairs: views of the trainers' memory with the global shape,
        each name once a round, tied names one by one. What comes in pieces (from several ranks, or
        larger than a slot) is put together first, in memory of the worker's own. Tensors that are
        attached are copied as ever, and not given.

        The memory is mapped without the right to write: who writes to a view in place (`add_`,
        `copy_`) kills the process by SIGSEGV. All views must be gone when the callback returns:
        copy what is to stay. If one is kept (in a list, as a slice, by numpy) the worker is out of
        the round, by name, and the trainer must not write to the memory until it is dropped; a
        bare pointer that is kept is not seen.

        It runs where the other hooks run, and may be a coroutine function with `astep` and
        `versions`. What it raises puts the replica out of the round. May be used as a decorator.

        Args:
            callback: What gets the tensors.
            names: The names that it wants; None: all that come and are not attached.
            strict: Whether one of `names` that is not sent puts the worker out of the round.
            together: Groups of names, a weight and its scale say, that are given in one call; a
                group of which only a part comes puts the worker out of the round.
            recorded: For an engine that begins and ends its loads itself: what the callback loads
                by. Names that the load at hand repeats are copied, and not given.
            lacks: Returns a text for each thing that the engine lacks so far of the round, or of
                what a round of some tensors (True) has begun. Asked after each batch by which no
                name is lacking; who lacks something when all has come is out of the round.

        Raises:
            ConfigError: There is a callback already, `recorded` and names or groups are given, or the worker has begun to work.
            NoBrokerError: There is no broker; says where it was looked for.
            RefusedError: The broker refuses: the place in the replica is taken, say.
        """
        self._check_here()
        if self._intake.sink is not None:
            raise ConfigError(f"{self!r} has an on_stage already: call both in one function")
        if recorded is not None:
            if names is not None or together:
                raise ConfigError("on_stage with recorded= takes all names, and no groups")
            loading = Loading(recorded, callback, begins=False, lacks=lacks or (lambda _: ()))
            self._load_by(loading)
            return callback
        sink = CallbackSink(callback, names, strict, together, lacks=lacks or (lambda _: ()))
        self._join(lambda: self._intake.give_to(sink), lambda: self._intake.give_to(None))
        return callback

    def attach_loader(
        self,
        load_weights: LoadWeights,
        parameters: WrittenTo,
        *,
        lacks: Lacks | None = None,
    ) -> RecordedLoad:
        """Has versions loaded by an engine's own loader, recorded once, and joins the channel.

            worker.attach_loader(model.load_weights, model)

        The first version is loaded by `load_weights`, and each copy that it makes is noted. Later
        ones are copied so, from the trainers' memory into the parameters, without it. Names of
        which it makes anything but copies go to it in each round, as `on_stage` gives them: the
        log says which and why, and so does `fallback` of what is returned. When a parameter is
        replaced, or other tensors come, the round is loaded as a whole, and noted anew.

        Args:
            load_weights: Called with an iterator of names and tensors: takes all, keeps none.
            parameters: The model that it writes to; or returns names and tensors of all that it
                writes to, as they are now. What it changes elsewhere is left to it, too.
            lacks: See `on_stage`: for what a first version may lack, which nobody else knows.

        Raises:
            ConfigError, NoBrokerError, RefusedError: As for `on_stage`; something is attached.
        """
        self._check_here()
        if self._intake.sink is not None or self._intake.attached is not None:
            raise ConfigError(f"{self!r} has tensors or a callback already: a loader has them all")
        require_callable("load_weights", load_weights, "weights")
        if not callable(parameters):
            raise ConfigError(
                f"attach_loader: parameters is a {type(parameters).__name__}: give the model, or what"
                " returns names and tensors when it is called, `lambda: parameters` say"
            )
        require_callable("parameters", parameters)
        load = RecordedLoad(checked(load_weights), parameters)
        hooks = self._performer.hooks
        finish, abandon = lambda _: load.finish(), lambda *_: load.abandon()
        callback: StageCallback = lambda _, tensors: load.load(tensors)
        self._load_by(Loading(load, callback, begins=True, lacks=lacks or (lambda _: ())))
        hooks.commit.insert(0, finish)  # Before what others do with the weights.
        hooks.abort.insert(0, abandon)
        return load

    def _load_by(self, loading: Loading) -> None:
        self._join(lambda: self._intake.load_by(loading), lambda: self._intake.load_by(None))

    def _join(self, begin: Callable[[], None], undo: Callable[[], None]) -> None:
        """Connects with what the worker wants now, which `begin` sets and `undo` takes back."""
        with self._connection.mutex:
            if self._core.state.note.seen or self._core.state.round is not None:
                raise ConfigError(
                    f"{self!r} works already: call attach() and on_stage() before run() or step()"
                )
            begin()
        try:
            self._connect(math.inf)
        except BaseException:
            undo()
            raise
