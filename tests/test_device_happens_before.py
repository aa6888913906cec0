"""The tracker: it finds exactly the uses of shared regions that nothing orders."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.device.base import Access, Region
from stretto.device.happens_before import HOST, HappensBefore
from stretto.device.hazards import Conflict, Hazard, HazardError, hazard_of

STAGING: Region = ("staging.host", 0)
PLAN: Region = ("staging.device", 0)
RESULTS: Region = ("results.host", 0)
PAGE: Region = ("page", 7)


def copy_plan() -> None: ...
def forward() -> None: ...


class World:
    """A tracker with the host and two streams, spoken to briefly."""

    def __init__(self, raising: bool = True) -> None:
        self.order = HappensBefore(raising=raising)
        self.scheduler = self.order.actor("scheduler")
        self.engine = self.order.actor("engine")

    def host(self, *, reads: tuple[Region, ...] = (), writes: tuple[Region, ...] = ()) -> None:
        self.order.host_access(reads, writes, sys._getframe())

    def run(self, actor: int, *, reads: tuple[Region, ...] = (), writes: tuple[Region, ...] = ()) -> None:
        work = copy_plan if actor == self.scheduler else forward
        self.order.launch(actor, work, Access(reads, writes), sys._getframe())

    def wait_stream(self, actor: int, other: int) -> None:
        self.order.wait(actor, self.order.point(other))

    def synchronize(self, actor: int) -> None:
        self.order.host_knows(self.order.point(actor))

    def take(self, *regions: Region) -> None:
        self.order.take(regions, sys._getframe())

    def release(self, *regions: Region) -> None:
        self.order.release(regions, sys._getframe())


def test_forward_before_the_copy_of_its_plan_is_raw_plan() -> None:
    world = World()
    world.host(writes=(STAGING,))
    world.run(world.scheduler, reads=(STAGING,), writes=(PLAN,))
    with pytest.raises(HazardError) as info:
        world.run(world.engine, reads=(PLAN,))
    assert info.value.hazard is Hazard.raw_plan
    assert info.value.conflict is Conflict.read_before_write
    assert info.value.region == PLAN


def test_forward_after_the_copy_of_its_plan_is_fine() -> None:
    world = World()
    world.host(writes=(STAGING,))
    world.run(world.scheduler, reads=(STAGING,), writes=(PLAN,))
    world.wait_stream(world.engine, world.scheduler)
    world.run(world.engine, reads=(PLAN,))


def test_a_plan_that_nobody_copied_is_raw_plan() -> None:
    world = World()
    with pytest.raises(HazardError) as info:
        world.run(world.engine, reads=(PLAN,))
    assert (info.value.hazard, info.value.conflict) == (Hazard.raw_plan, Conflict.never_written)


def test_reading_results_without_synchronising_is_raw_results() -> None:
    world = World()
    world.run(world.engine, writes=(RESULTS,))
    with pytest.raises(HazardError) as info:
        world.host(reads=(RESULTS,))
    assert info.value.hazard is Hazard.raw_results


def test_reading_results_after_synchronising_is_fine_even_while_later_work_runs() -> None:
    world = World()
    world.run(world.engine, writes=(RESULTS,))
    copy_done = world.order.point(world.engine)
    world.run(world.engine, writes=(("results.host", 1),))
    world.order.host_knows(copy_done)
    world.host(reads=(RESULTS,))
    with pytest.raises(HazardError):
        world.host(reads=(("results.host", 1),))


def test_refilling_a_staging_buffer_under_its_copy_is_war_staging() -> None:
    world = World()
    world.host(writes=(STAGING,))
    world.run(world.scheduler, reads=(STAGING,))
    with pytest.raises(HazardError) as info:
        world.host(writes=(STAGING,))
    assert (info.value.hazard, info.value.conflict) == (Hazard.war_staging, Conflict.write_before_read)


def test_refilling_a_staging_buffer_after_its_copy_is_fine() -> None:
    world = World()
    world.host(writes=(STAGING,))
    world.run(world.scheduler, reads=(STAGING,))
    world.synchronize(world.scheduler)
    world.host(writes=(STAGING,))


def test_copying_over_a_plan_that_the_engine_still_reads_is_war_staging() -> None:
    world = World()
    world.run(world.scheduler, writes=(PLAN,))
    world.wait_stream(world.engine, world.scheduler)
    world.run(world.engine, reads=(PLAN,))
    with pytest.raises(HazardError) as info:
        world.run(world.scheduler, writes=(PLAN,))
    assert info.value.hazard is Hazard.war_staging


def test_two_unordered_writes_are_a_conflict() -> None:
    world = World()
    world.run(world.scheduler, writes=(PAGE,))
    with pytest.raises(HazardError) as info:
        world.run(world.engine, writes=(PAGE,))
    assert info.value.conflict is Conflict.write_before_write


def test_releasing_a_page_under_a_launched_step_is_war_pages_and_slots() -> None:
    for access in ({"reads": (PAGE,)}, {"writes": (PAGE,)}):
        world = World()
        world.host(writes=(PAGE,))
        world.run(world.engine, **access)
        with pytest.raises(HazardError) as info:
            world.release(PAGE)
        assert (info.value.hazard, info.value.conflict) == (Hazard.war_pages_and_slots, Conflict.released_in_flight)


def test_knowing_an_earlier_step_done_does_not_allow_a_release_under_a_later_one() -> None:
    world = World()
    world.run(world.engine, writes=(PAGE,))
    first = world.order.point(world.engine)
    world.run(world.engine, reads=(PAGE,))
    world.order.host_knows(first)
    with pytest.raises(HazardError):
        world.release(PAGE)


def test_a_released_page_may_be_used_again_only_by_a_new_owner() -> None:
    world = World()
    world.take(PAGE)
    world.run(world.engine, writes=(PAGE,))
    world.synchronize(world.engine)
    world.release(PAGE)
    for access in ({"reads": (PAGE,)}, {"writes": (PAGE,)}):
        with pytest.raises(HazardError) as info:
            world.run(world.engine, **access)
        assert (info.value.hazard, info.value.conflict) == (Hazard.war_pages_and_slots, Conflict.used_after_release)
    world.take(PAGE)
    world.run(world.engine, writes=(PAGE,))
    world.run(world.engine, reads=(PAGE,))


def test_a_new_owner_must_not_read_what_the_old_one_left() -> None:
    world = World()
    world.take(PAGE)
    world.run(world.engine, writes=(PAGE,))
    world.synchronize(world.engine)
    world.release(PAGE)
    world.take(PAGE)
    with pytest.raises(HazardError) as info:
        world.run(world.engine, reads=(PAGE,))
    assert info.value.conflict is Conflict.never_written


def test_a_page_has_one_owner_at_a_time() -> None:
    world = World()
    world.take(PAGE)
    with pytest.raises(HazardError) as info:
        world.take(PAGE)
    assert info.value.conflict is Conflict.taken_twice
    world.release(PAGE)
    with pytest.raises(HazardError) as info:
        world.release(PAGE)
    assert info.value.conflict is Conflict.released_twice


def test_a_token_that_no_step_has_sampled_is_token_feedback() -> None:
    world = World()
    world.run(world.engine, writes=(("token", 40),))
    with pytest.raises(HazardError) as info:
        world.run(world.engine, reads=(("token", 41),))
    assert info.value.hazard is Hazard.token_feedback


def test_order_passes_on_from_stream_to_stream_to_host() -> None:
    world = World()
    world.run(world.scheduler, writes=(PAGE,))
    world.wait_stream(world.engine, world.scheduler)
    world.run(world.engine)
    world.synchronize(world.engine)
    world.host(reads=(PAGE,))


def test_what_the_host_does_after_enqueueing_is_not_before_the_work() -> None:
    world = World()
    world.host(writes=(STAGING,))
    world.run(world.scheduler, reads=(STAGING,))
    world.run(world.scheduler)
    with pytest.raises(HazardError):
        world.host(writes=(STAGING,))


def test_a_stream_made_later_is_ordered_like_the_others() -> None:
    world = World()
    world.run(world.engine, writes=(PAGE,))
    early = world.order.point(world.engine)
    late = world.order.actor("late")
    with pytest.raises(HazardError):
        world.order.launch(late, forward, Access(reads=(PAGE,)), sys._getframe())
    world.order.wait(late, early)
    world.order.launch(late, forward, Access(reads=(PAGE,)), sys._getframe())


def test_a_report_names_hazard_region_both_sides_and_where_they_were_enqueued() -> None:
    world = World()
    world.run(world.scheduler, writes=(PLAN,))
    with pytest.raises(HazardError) as info:
        world.run(world.engine, reads=(PLAN,))
    text = str(info.value)
    assert "raw_plan" in text
    assert "('staging.device', 0)" in text
    assert "'copy_plan' on stream 'scheduler'" in text
    assert "'forward' on stream 'engine'" in text
    assert text.count(f"enqueued at {__file__}:") == 2


def test_a_conflict_on_a_region_of_unknown_kind_is_reported_without_a_hazard_name() -> None:
    world = World()
    with pytest.raises(HazardError, match="unnamed") as info:
        world.host(reads=(("my own", 1),))
    assert info.value.hazard is None


def test_collecting_goes_on_after_a_hazard() -> None:
    world = World(raising=False)
    world.run(world.engine, writes=(RESULTS,))
    world.host(reads=(RESULTS,))
    world.host(reads=(PLAN,))
    assert [error.hazard for error in world.order.hazards] == [Hazard.raw_results, Hazard.raw_plan]


@pytest.mark.parametrize("kind", ["staging.host", "staging.device", "results.host", "page", "row", "token"])
@pytest.mark.parametrize("conflict", Conflict)
def test_every_conflict_on_a_known_kind_has_a_hazard(kind: str, conflict: Conflict) -> None:
    assert hazard_of(kind, conflict) in Hazard


# --- against a reference: the set of everything that an actor has seen, written out ---------------------------------


@dataclass
class Reference:
    """Happens-before by explicit sets of the actions that each actor has seen; conflicts by looking at all pairs."""

    seen: dict[int, set[int]] = field(default_factory=lambda: {actor: set() for actor in range(4)})
    events: dict[int, set[int]] = field(default_factory=dict)
    uses: list[tuple[Region, bool, int]] = field(default_factory=list)
    actions: int = 0

    def act(self, actor: int, reads: tuple[Region, ...], writes: tuple[Region, ...]) -> bool:
        """Do one action; whether it conflicts with an earlier one that it does not follow."""
        if actor != HOST:
            self.seen[actor] |= self.seen[HOST]
        conflict = any(
            region == used and (write or wrote) and action not in self.seen[actor]
            for region, write in [(r, False) for r in reads] + [(w, True) for w in writes]
            for used, wrote, action in self.uses
        )
        self.actions += 1
        self.seen[actor].add(self.actions)
        self.uses += [(region, False, self.actions) for region in reads]
        self.uses += [(region, True, self.actions) for region in writes]
        return conflict

    def unknown_to_host(self, region: Region) -> bool:
        return any(region == used and action not in self.seen[HOST] for used, _, action in self.uses)


REGIONS = [("page", index) for index in range(3)]
STREAMS = st.integers(1, 3)
SOME = st.lists(st.sampled_from(REGIONS), max_size=2, unique=True).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("act"), st.integers(0, 3), SOME, SOME),
    st.tuples(st.just("record"), STREAMS, st.integers(0, 2)),
    st.tuples(st.just("wait"), STREAMS, st.integers(0, 2)),
    st.tuples(st.just("wait_stream"), STREAMS, STREAMS),
    st.tuples(st.just("synchronize"), st.integers(0, 2)),
    st.tuples(st.just("release"), st.sampled_from(REGIONS)),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_the_first_conflict_is_found_where_the_reference_finds_it(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    order, reference = HappensBefore(), Reference()
    for name in "abc":
        order.actor(name)
    points: dict[int, tuple[int, ...]] = {}
    frame = sys._getframe()
    order.host_access((), REGIONS, frame)
    reference.act(HOST, (), tuple(REGIONS))
    for step in steps:
        found = expected = False
        match step:
            case ("act", actor, reads, writes):
                expected = reference.act(actor, reads, writes)
                try:
                    if actor == HOST:
                        order.host_access(reads, writes, frame)
                    else:
                        order.launch(actor, forward, Access(reads, writes), frame)
                except HazardError:
                    found = True
            case ("record", actor, event):
                points[event] = order.point(actor)
                reference.events[event] = set(reference.seen[actor])
            case ("wait", actor, event) if event in points:
                order.wait(actor, points[event])
                reference.seen[actor] |= reference.events[event]
            case ("wait_stream", actor, other):
                order.wait(actor, order.point(other))
                reference.seen[actor] |= reference.seen[other]
            case ("synchronize", event) if event in points:
                order.host_knows(points[event])
                reference.seen[HOST] |= reference.events[event]
            case ("release", region):
                expected = reference.unknown_to_host(region)
                try:
                    order.release([region], frame)
                    order.take([region], frame)
                    order.host_access((), [region], frame)
                    reference.act(HOST, (), (region,))
                except HazardError:
                    found = True
        assert found == expected, step
        if found:
            return
