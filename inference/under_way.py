"""The groups under way: whose request is whose, and what is new about them."""

from __future__ import annotations

from .completion import Event
from .group import Group
from .request import Request


class UnderWay:
    """Groups by their own id and by those of their requests, until they are done."""

    def __init__(self):
        self._groups: dict[int, Group] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, groups: list[Group]) -> None:
        for group in groups:
            if not group.done:
                self._groups[group.id] = group
                self._groups.update({request.id: group for request in group.requests})

    def get(self, number: int) -> Group | None:
        return self._groups.get(number)

    def of(self, request: Request) -> Group:
        return self._groups[request.id]

    def forget(self, group: Group) -> None:
        self._groups.pop(group.id, None)
        for request in group.requests:
            self._groups.pop(request.id, None)

    def events(self, news: list[Request]) -> list[Event]:
        """Say what is new, a group's completion last; groups that are done are forgotten."""
        events = []
        last = {self.of(request).id: request for request in news}
        for request in news:
            group = self.of(request)
            event = group.event(request, final=group.done and last[group.id] is request)
            if event is not None:
                events.append(event)
        for request in last.values():
            if (group := self.of(request)).done:
                self.forget(group)
        return events

    def refuse_all(self, reason: str) -> None:
        for group in list(self._groups.values()):
            group.refuse(reason)
        self._groups.clear()
