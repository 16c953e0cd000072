"""The engine: one sequence's cache in memory that is shared with a sidecar, published or read."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, TypeAlias

import torch
from transformers import DynamicCache, PreTrainedModel

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.engines.transformers.caches import held, rebuild
from kvxfer.engines.transformers.layout import SequenceLayout
from kvxfer.engines.transformers.presets import compare
from kvxfer_client import (
    Client,
    LeaseInfo,
    Owned,
    Registered,
    Session,
    SharedRegion,
    Ticket,
    TransferInfo,
    make_ticket,
    new_lease_token,
    ticket_from_string,
    ticket_to_string,
)

#: Makes memory of so many bytes: ``SharedRegion.create_memfd``, ``create_shm``, a function of the caller's that calls
#: ``create_file``, or ``Owned`` for memory that the sidecar makes.
MakeMemory: TypeAlias = Callable[[int], SharedRegion | Owned]

#: Goes before every compatibility key: these bytes mean something to this module alone.
_FORMAT: Final = "transformers-1/"


class SequenceCache:
    """Room for the cache of one sequence in shared memory, registered with a sidecar.

    What is published and what is read are copies: the model goes on with tensors of its own, so that no later step
    changes what has been published.  A context manager: closes at the end.
    """

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel,
        max_tokens: int,
        memory: MakeMemory = SharedRegion.create_memfd,
        *,
        compatibility_key: str,
        block_tokens: int = 16,
        check_preset: bool = True,
        replace: bool = False,
    ) -> None:
        """Run the model on one token to see what its cache holds, make the memory, and register it in a session.

        :param client: of the sidecar; its ``engine_id`` is what others know this engine by.  It stays the caller's.
        :param model: anything with a ``forward`` that takes tokens and a ``DynamicCache``, on any device.
        :param max_tokens: tokens of the longest sequence.
        :param memory: makes the memory.  With ``Owned``, what is published can still be read when this process dies.
        :param compatibility_key: whatever changes what the cache means: the model and its revision.
        :param block_tokens: tokens that are moved at a time, at least.  Both sides choose for themselves.
        :param check_preset: whether kvxfer's preset of the model, if there is one, must agree.
        :param replace: an earlier registration of this engine gives way, as one of a process before this.
        :raises KvxferError: UNSUPPORTED for a cache that cannot be moved; LAYOUT_MISMATCH where the preset differs;
            FIELD_INVALID; and what :meth:`Client.session` may raise.
        """
        self.client: Final = client
        self.model: Final = model
        template = held(self._run(torch.zeros(1, 1, dtype=torch.long)))
        #: Whether a preset of the model was there, and agreed.
        self.preset_agrees: Final = compare(template, model.config) if check_preset else False
        self.layout: Final = SequenceLayout(template, max_tokens, block_tokens)
        self._key: Final = f"{_FORMAT}{compatibility_key}"
        self._saved = 0
        self._published: tuple[str, bytes] | None = None
        #: A read that has not come back with success: it may still be writing.
        self._reading: str | None = None
        #: What the last :meth:`read` moved.
        self.last_read: TransferInfo | None = None
        made = memory(self.layout.size)
        self._region: SharedRegion | None = made if isinstance(made, SharedRegion) else None
        try:
            self.session: Final[Session] = client.session(
                self.layout.cache_layout,
                [made],
                compatibility_key=self._key,
                replace=replace,
                keep_leases=isinstance(made, Owned),
                on_lost=self._lost,
            )
            if self._region is None:
                self._region = SharedRegion.map(self.session.wait_registered().exported[0])
        except BaseException:
            self.close()
            raise

    # -- prefill -----------------------------------------------------------------------------------------------------

    def prefill(self, input_ids: torch.Tensor, request_id: str, *, ttl: float = 60.0) -> str:
        """Run all tokens of a prompt but the last, and publish the cache: the whole of P's part.

        D computes the last one itself: a state that has seen it could not be rewound.

        :param input_ids: ``(1, N)``, N at least 2.
        :returns: the ticket, for :meth:`read`.
        :raises KvxferError: FIELD_INVALID for a prompt of another shape; and as :meth:`save` and :meth:`publish`.
        """
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 2:
            shape = tuple(input_ids.shape)
            raise KvxferError(
                Reason.FIELD_INVALID,
                f"input_ids have the shape {shape}; allowed: (1, N) with N of at least 2",
                field="input_ids",
                value=shape,
            )
        tokens = input_ids.shape[1] - 1
        self.layout.check(tokens)
        self.save(self._run(input_ids[:, :-1]), tokens)
        return self.publish(request_id, ttl=ttl)

    def save(self, cache: DynamicCache, num_tokens: int | None = None) -> int:
        """Copy a cache into the shared memory, complete when this returns.

        :param num_tokens: tokens that the cache has seen; may be left out where a layer with attention tells.
        :returns: them.
        :raises KvxferError: LOCAL_BLOCK_BUSY while what was published before may still be read; UNSUPPORTED or
            FIELD_INVALID for a cache that is not of this model, or too long.
        """
        self._check_free()
        items = held(cache)
        if num_tokens is None:
            num_tokens = next((item.tensor.shape[-2] for item in items if item.per_token), None)
        if num_tokens is None:
            raise KvxferError(
                Reason.FIELD_INVALID,
                "num_tokens is needed: no layer of this cache says how many tokens it has seen",
                field="num_tokens",
            )
        self._saved = 0
        self.layout.save(items, self._memory.torch, num_tokens)
        self._saved = num_tokens
        return num_tokens

    def publish(self, request_id: str, *, ttl: float = 60.0) -> str:
        """Offer what was saved last.

        :param request_id: names it; another one each time.
        :param ttl: how long it is held for its reader, seconds.
        :returns: the ticket.
        :raises KvxferError: FIELD_INVALID where nothing was saved; LOCAL_BLOCK_BUSY while it is offered already; and as
            :meth:`Client.publish`.
        """
        self._check_free()
        if not self._saved:
            raise KvxferError(Reason.FIELD_INVALID, "nothing was saved that could be published", field="cache")
        now, token = self.session.wait_registered(), new_lease_token()
        blocks = self.layout.blocks(self._saved)
        self.client.publish(request_id, blocks, self._saved, token, ttl=ttl, incarnation=now.incarnation)
        self._published = (request_id, token)
        return ticket_to_string(self._ticket(now, request_id, token, ttl))

    def _ticket(self, now: Registered, request_id: str, token: bytes, ttl: float) -> Ticket:
        return make_ticket(
            engine_id=self.client.engine_id,
            compatibility_key=self._key,
            ranks=[now.ticket_rank],
            request_id=request_id,
            blocks=self.layout.blocks(self._saved),
            num_tokens=self._saved,
            lease_token=token,
            ttl=ttl,
        )

    def wait(self, *, timeout: float = 60.0) -> LeaseInfo | None:
        """Wait until what is published has been read, or has expired; then the memory can be used again.

        :param timeout: seconds.
        :returns: how it ended; ``None`` where nothing is published.
        :raises KvxferError: DEADLINE_EXCEEDED; and as :meth:`Client.watch_leases`.
        """
        if self._published is None:
            return None
        request_id, _ = self._published
        with self.client.watch_leases(include_current=True, timeout=timeout) as leases:
            lease = next(lease for lease in leases if lease.request_id == request_id and lease.state.ended)
        self._published = None
        return lease

    def withdraw(self, *, timeout: float = 60.0) -> None:
        """Take back what is published, and wait until nobody reads it any more.

        :param timeout: seconds for reads that go on.
        :raises KvxferError: as :meth:`Client.withdraw` and :meth:`wait`.
        """
        if self._published is not None and self.client.withdraw(*self._published):
            self.wait(timeout=timeout)
        self._published = None

    # -- decode ------------------------------------------------------------------------------------------------------

    def read(self, ticket: Ticket | str, *, timeout: float = 60.0) -> DynamicCache:
        """Read what P has published, as a cache to go on with: of ``ticket.num_tokens`` tokens, on the model's device.

        :param ticket: of P.
        :param timeout: seconds for the read.
        :raises KvxferError: FIELD_INVALID where there is no room for so many tokens; LOCAL_BLOCK_BUSY while something
            that was published from here may still be read; and as :meth:`Client.read`.
        """
        self._check_free()
        found = ticket_from_string(ticket) if isinstance(ticket, str) else ticket
        self._saved = 0
        blocks = self.layout.blocks(found.num_tokens)
        self._reading = uuid.uuid4().hex
        self.last_read = self.client.read(found, blocks, transfer_id=self._reading, timeout=timeout)
        self._reading = None
        return self.load(found.num_tokens)

    def load(self, num_tokens: int) -> DynamicCache:
        """A cache of whatever lies in the shared memory; :meth:`read` does this when everything has arrived."""
        device = self.model.device
        return rebuild(self.model.config, self.layout.load(self._memory.torch, num_tokens, device))

    # -- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the registration, and with it what is published; let go of the memory.  Idempotent.

        :raises KvxferError: as :meth:`Session.close`.
        """
        session: Session | None = getattr(self, "session", None)
        if session is not None:
            session.close(unregister=True)
        region, self._region = self._region, None
        if region is not None:
            region.close()
            region.unlink()

    def __enter__(self) -> SequenceCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _memory(self) -> SharedRegion:
        if self._region is None:
            raise KvxferError(Reason.FIELD_INVALID, "this SequenceCache is closed", field="region", value="closed")
        return self._region

    def _run(self, input_ids: torch.Tensor) -> DynamicCache:
        """The cache of some tokens, from the first."""
        cache = DynamicCache(config=self.model.config)
        names = inspect.signature(self.model.forward).parameters
        name = next((n for n in ("cache", "past_key_values", "cache_params") if n in names), None)
        if name is None:
            raise KvxferError(
                Reason.UNSUPPORTED,
                f"{type(self.model).__name__}.forward takes no cache",
                field="model",
                type=type(self.model).__name__,
            )
        with torch.inference_mode():
            self.model(input_ids=input_ids.to(self.model.device), use_cache=True, **{name: cache})
        return cache

    def _check_free(self) -> None:
        """Refuse to write over what may still be read, or to use what a failed read may still write."""
        if self._reading is not None and not self._quiesced(self._reading):
            raise KvxferError(
                Reason.LOCAL_BLOCK_BUSY,
                f"the read {self._reading} has failed, and may still write into this memory; ask again later",
                field="cache",
                other_transfer_id=self._reading,
            )
        self._reading = None
        if self._published is None:
            return
        request_id, _ = self._published
        lease = next((x for x in self.client.list_leases() if x.request_id == request_id), None)
        if lease is not None and not lease.state.ended:
            raise KvxferError(
                Reason.LOCAL_BLOCK_BUSY,
                f"what was published as {request_id} may still be read: wait() for its reader, or withdraw() it",
                field="cache",
                request_id=request_id,
            )
        self._published = None

    def _quiesced(self, transfer_id: str) -> bool:
        try:
            return self.client.cancel(transfer_id).quiesced
        except KvxferError as error:
            # It was refused before it began, or its registration has ended since: neither leaves anything behind.
            if error.reason in (Reason.TRANSFER_UNKNOWN, Reason.NOT_REGISTERED):
                return True
            raise

    def _lost(self, reason: Any, incarnation: str) -> None:
        """The sidecar is gone, and all that was published with it."""
        self._published = None
