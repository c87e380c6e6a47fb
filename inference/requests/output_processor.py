"""From sampled tokens to what callers read: detokenize, find stop strings, queue stream events.

    a step of any call ─▶ updated requests ─▶ the event queue of the call that submitted them

Every step runs the requests of all callers. Each group therefore names the queue its caller reads,
and puts exactly one completion there, whichever call runs the last step and however that ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .outputs import StreamEvent
from .request import Request
from .request_group import RequestGroup

EventQueue = deque[StreamEvent]
"""Events that a caller has not read yet."""


class OutputProcessor:
    """The groups that are not done, and the queue of each."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[RequestGroup, EventQueue]] = {}
        self._group_of: dict[int, RequestGroup] = {}
        """By request id."""

    def has_requests(self) -> bool:
        return bool(self._groups)

    def add(self, groups: Iterable[RequestGroup], queue: EventQueue) -> None:
        """Track groups; those that failed already are answered at once."""
        for group in groups:
            if group.done:
                queue.append(_final_event(group))
            else:
                self._groups[group.id] = group, queue
                for request in group.requests:
                    self._group_of[request.id] = group

    def get(self, group_id: int) -> RequestGroup | None:
        return self._groups[group_id][0] if group_id in self._groups else None

    def remove(self, group: RequestGroup) -> None:
        self._groups.pop(group.id, None)
        for request in group.requests:
            self._group_of.pop(request.id, None)

    def detokenize(self, updated: Iterable[Request]) -> set[int]:
        """Decode new tokens; return the ids of requests whose text reached a stop string."""
        return {r.id for r in updated if self._group_of[r.id].detokenize(r)}

    def publish(self, updated: list[Request]) -> None:
        """Queue the new events, a group's completion last; groups that are done are removed."""
        groups = [self._group_of[request.id] for request in updated]
        last = {group.id: request for group, request in zip(groups, updated, strict=True)}
        for group, request in zip(groups, updated, strict=True):
            final = request.finish_reason is not None and group.done and last[group.id] is request
            event = group.event(request, final)
            if event is not None:
                self._groups[group.id][1].append(event)
            if final:
                self.remove(group)

    def fail_all(self, error: str) -> list[Request]:
        """End every group with an error; return the requests that were not finished."""
        groups = [group for group, _ in self._groups.values()]
        unfinished = [r for group in groups for r in group.requests if r.finish_reason is None]
        for group, queue in list(self._groups.values()):
            self.remove(group)
            group.fail(error)
            queue.append(_final_event(group))
        return unfinished


def _final_event(group: RequestGroup) -> StreamEvent:
    return StreamEvent(group.id, [], "", group.result())
