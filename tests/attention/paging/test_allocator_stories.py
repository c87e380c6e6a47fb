"""The page allocator as a state machine: Hypothesis looks for a sequence of calls that fails."""

import pytest
from allocator_world import SCOPES, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

WHO = st.integers(0, 9)


class Machine(RuleBasedStateMachine):
    """Hypothesis looks for the shortest story in which the allocator goes wrong."""

    def __init__(self):
        super().__init__()
        self.world = World(num_pages=6, page_size=32)

    def owner(self, who):
        owners = list(self.world.text)
        return owners[who % len(owners)]

    @rule(
        stem=st.sampled_from([0, 16, 32, 40]),
        rest=st.integers(0, 20),
        scope=st.sampled_from(SCOPES),
    )
    def start(self, stem, rest, scope):
        self.world.start([7] * stem + [rest % 3] * rest, scope)

    @precondition(lambda self: self.world.text)
    @rule(who=WHO, count=st.sampled_from([1, 5, 16, 33]))
    def write(self, who, count):
        self.world.write(self.owner(who), [7] * count)

    @precondition(lambda self: self.world.text)
    @rule(who=WHO, register=st.booleans())
    def end(self, who, register):
        self.world.end(self.owner(who), register)

    @precondition(lambda self: self.world.text)
    @rule(who=WHO)
    def register(self, who):
        owner = self.owner(who)
        self.world.pages.register(owner, self.world.text[owner], self.world.scope[owner])

    @rule()
    def clear_prefixes(self):
        self.world.pages.clear_prefixes()

    @invariant()
    def everything_adds_up(self):
        self.world.pages.check()
        for owner in list(self.world.text)[-2:]:
            self.world.read(owner)

    def teardown(self):
        for owner in list(self.world.text):
            self.world.read(owner)
            self.world.end(owner, register=False)
        assert self.world.pages.available == self.world.pages.num_pages


def stories(count):
    """Stories of 100 rules each."""
    return settings(
        max_examples=count,
        stateful_step_count=100,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def test_five_thousand_rules_find_no_story_that_goes_wrong():
    run_state_machine_as_test(Machine, settings=stories(50))


@pytest.mark.slow
def test_a_million_rules_find_no_story_that_goes_wrong():
    run_state_machine_as_test(Machine, settings=stories(10_000))
