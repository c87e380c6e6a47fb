"""The groups under way: whose request is whose, and where its news go.

    a step of any call ─▶ requests with news ─▶ the inbox of the call that asked

Every step runs everybody's requests. So each group names the inbox its caller reads, and gives it
one completion, whoever runs the step that ends it, and whatever becomes of that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .outputs import StreamEvent
from .request import Request
from .request_group import RequestGroup

Inbox = deque[StreamEvent]
"""What a caller has not read yet."""


class ActiveRequests:
    """Groups that are not done."""

    def __init__(self):
        self._groups: dict[int, tuple[RequestGroup, Inbox]] = {}
        self._owners: dict[int, RequestGroup] = {}
        """By request."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, groups: Iterable[RequestGroup], inbox: Inbox) -> None:
        """Take groups in; those refused already are answered at once."""
        for group in groups:
            if group.done:
                inbox.append(_last(group))
            else:
                self._groups[group.id] = group, inbox
                self._owners.update({request.id: group for request in group.requests})

    def get(self, number: int) -> RequestGroup | None:
        return self._groups[number][0] if number in self._groups else None

    def of(self, request: Request) -> RequestGroup:
        return self._owners[request.id]

    def forget(self, group: RequestGroup) -> None:
        self._groups.pop(group.id, None)
        for request in group.requests:
            self._owners.pop(request.id, None)

    def tell(self, news: list[Request]) -> None:
        """Say what is new, a group's completion last; groups that are done are forgotten."""
        last = {self.of(request).id: request for request in news}
        for request in news:
            group = self.of(request)
            final = group.done and last[group.id] is request
            event = group.event(request, final)
            if event is not None:
                self._groups[group.id][1].append(event)
            if final:
                self.forget(group)

    def fail_all(self, error: str) -> list[Request]:
        """End every group with an error; return what was still open."""
        lost = [r for r in self._requests() if r.finish_reason is None]
        for group, inbox in list(self._groups.values()):
            self.forget(group)
            group.refuse(error)
            inbox.append(_last(group))
        return lost

    def _requests(self) -> Iterable[Request]:
        return (request for group, _ in self._groups.values() for request in group.requests)


def _last(group: RequestGroup) -> StreamEvent:
    return StreamEvent(group.id, [], "", group.result())
