"""Discovery, conflicts, broken plugins, blocking, and making a proposer."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import pytest
from pydantic import Field

from specplug import Capability, Options, PluginManager, Proposer, ProposerSpec, hookimpl, proposer
from specplug.errors import (
    CapabilityError,
    DependencyError,
    OptionError,
    PluginError,
    ProposerConflictError,
    UnknownProposerError,
)

SPEC = """
from specplug import Proposer, ProposerSpec
class P(Proposer):
    def propose(self, batch):
        return [[1]] * len(batch)
SPEC = ProposerSpec(name={name!r}, factory=lambda options: P(), summary={summary!r})
"""

HOOKS = """
from specplug import ProposerSpec, hookimpl
@hookimpl
def specplug_proposers():
    return [ProposerSpec(name={name!r}, factory="x:y")]
"""


class Silent(Proposer):
    def propose(self, batch):
        return [[]] * len(batch)


def spec(name="tested", **more):
    return ProposerSpec(**{"name": name, "factory": lambda _: Silent()} | more)


def named(manager):
    return [registered.spec.name for registered in manager]


@pytest.fixture
def manager():
    return PluginManager(discover=False)


@pytest.fixture
def healthy(install):
    """A distribution that works, to see that others do not disturb it."""
    install(
        "healthy", entries={"e": "healthy_m:SPEC"}, healthy_m=SPEC.format(name="ok", summary="")
    )


# -- discovery ------------------------------------------------------------------------------


def test_installed_spec_is_found_with_its_origin(install):
    install(
        "my-dist", "2.3", entries={"first": "my_m:SPEC"}, my_m=SPEC.format(name="mine", summary="s")
    )
    manager = PluginManager()
    found = manager.get("mine")
    assert found.spec.summary == "s"
    origin = found.origin
    assert (origin.distribution, origin.version, origin.entry) == ("my-dist", "2.3", "first")
    assert str(origin) == "my-dist 2.3 (first)"
    assert not manager.problems


def test_built_in_proposers_come_through_the_same_entry_points():
    manager = PluginManager()
    for name in ("ngram", "prompt_lookup"):
        origin = manager.get(name).origin
        assert (origin.distribution, origin.entry) == ("specplug", name)
        assert origin.version


def test_nothing_is_discovered_when_told_not_to(healthy):
    assert named(PluginManager(discover=False)) == []


def test_module_with_hooks_and_decorated_function_are_found(install):
    function = """
    import specplug
    @specplug.proposer(name="short")
    def f(tokens, max_tokens):
        'Drafts one.'
        return [1]
    """
    install(
        "two",
        entries={"a": "two_hooks", "b": "two_f:f"},
        two_hooks=HOOKS.format(name="hooked"),
        two_f=textwrap.dedent(function),
    )
    manager = PluginManager()
    assert {"hooked", "short"} <= set(named(manager))
    assert manager.get("hooked").origin.entry == "a"
    assert manager.get("short").spec.summary == "Drafts one."
    assert not manager.problems


def test_two_distributions_may_use_one_entry_name(install):
    install("da", entries={"same": "da_m:SPEC"}, da_m=SPEC.format(name="pa", summary=""))
    install("db", entries={"same": "db_m:SPEC"}, db_m=SPEC.format(name="pb", summary=""))
    assert {"pa", "pb"} <= set(named(PluginManager()))


def test_iteration_is_sorted_by_name(manager):
    for name in ("b", "c", "a"):
        manager.add(spec(name))
    assert named(manager) == ["a", "b", "c"]


# -- conflicts ------------------------------------------------------------------------------


@pytest.fixture
def rivals(install, healthy):
    install("one", "1.1", entries={"x": "one_m:SPEC"}, one_m=SPEC.format(name="dup", summary=""))
    install("two", "2.2", entries={"y": "two_m:SPEC"}, two_m=SPEC.format(name="dup", summary=""))


def test_a_name_claimed_twice_is_refused_naming_both(rivals):
    manager = PluginManager()
    with pytest.raises(ProposerConflictError) as error:
        manager.get("dup")
    for part in ("one 1.1 (x)", "two 2.2 (y)", "'dup'", "SPECPLUG_BLOCK"):
        assert part in str(error.value)
    origins = [str(origin) for origin in manager.conflicts()["dup"]]
    assert origins == ["one 1.1 (x)", "two 2.2 (y)"]


def test_a_conflict_costs_only_its_name(rivals):
    manager = PluginManager()
    assert {"ok", "ngram"} <= set(named(manager))
    assert "dup" not in named(manager)
    assert list(manager.conflicts()) == ["dup"]


@pytest.mark.parametrize("block", ["one", "one:x"])
def test_blocking_one_rival_settles_a_conflict(rivals, block):
    assert PluginManager(block=[block]).get("dup").origin.distribution == "two"


# -- broken plugins -------------------------------------------------------------------------

BAD_SIGNATURE = """
from specplug import hookimpl
@hookimpl
def specplug_request_end(proposer, no_such_argument):
    pass
"""
MISSPELT = """
from specplug import hookimpl
@hookimpl
def specplug_proposer():
    return []
"""
OFFERS = """
from specplug import hookimpl
@hookimpl
def specplug_proposers():
    {body}
"""


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("import no_such_package_x", "bad_m:SPEC", "no_such_package_x"),
        ("def f(:", "bad_m:SPEC", "SyntaxError"),
        ("import sys; sys.exit(3)", "bad_m:SPEC", "SystemExit"),
        ("raise KeyError('ouch')", "bad_m:SPEC", "KeyError"),
        ("", "bad_m:MISSING", "MISSING"),
        ("", "bad_missing_m:SPEC", "bad_missing_m"),
        ("SPEC = 5", "bad_m:SPEC", "5 is not a plugin"),
        ("SPEC = None", "bad_m:SPEC", "None is not a plugin"),
        ("SPEC = 'text'", "bad_m:SPEC", "not a plugin"),
        ("class SPEC: pass", "bad_m:SPEC", "not a plugin"),
        ("", "bad_m", "not a plugin"),
        (BAD_SIGNATURE, "bad_m", "no_such_argument"),
        (MISSPELT, "bad_m", "specplug_proposer"),
        (OFFERS.format(body="raise ZeroDivisionError('ouch')"), "bad_m", "ouch"),
        (OFFERS.format(body="return 5"), "bad_m", "int"),
        (OFFERS.format(body="return 'abc'"), "bad_m", "expected ProposerSpec"),
        (OFFERS.format(body="return [object]"), "bad_m", "expected ProposerSpec"),
        (
            "from specplug import ProposerSpec\nSPEC = ProposerSpec(name='Bad', factory='x:y')",
            "bad_m:SPEC",
            "'Bad' cannot be the name",
        ),
    ],
)
def test_a_broken_plugin_is_reported_and_the_others_work(
    install, healthy, caplog, source, target, reason
):
    install("broken", "0.9", entries={"entry": target}, bad_m=source)
    manager = PluginManager()
    assert {"ok", "ngram"} <= set(named(manager))
    assert manager.get("ok").origin.distribution == "healthy"
    (problem,) = manager.problems
    assert str(problem).startswith("broken 0.9 (entry): ")
    assert reason in problem.reason
    assert "broken 0.9 (entry)" in caplog.text


def test_an_unknown_name_also_says_which_plugin_was_left_out(install):
    install("broken", "0.9", entries={"entry": "bad_m:SPEC"}, bad_m="import no_such_package_x")
    with pytest.raises(UnknownProposerError, match=r"broken 0\.9 .*no_such_package_x"):
        PluginManager().get("whatever")


def test_a_plugin_with_one_bad_hook_is_rolled_back_whole(manager):
    """pluggy #733: a failed register() used to leave the good hooks behind."""
    seen = []

    class Plugin:
        @hookimpl
        def specplug_proposers(self):
            return [spec("half")]

        @hookimpl
        def specplug_request_end(self, request_id):
            seen.append(request_id)

        @hookimpl
        def specplug_started(self, proposer, wrong):
            pass

    plugin = Plugin()
    with pytest.raises(PluginError, match="wrong"):
        manager.add(plugin, entry="p")
    assert named(manager) == []
    assert manager.observers("specplug_request_end") == []

    Plugin.specplug_started = hookimpl(lambda self, proposer: None)
    manager.add(plugin, entry="p")
    assert named(manager) == ["half"]
    assert len(manager.observers("specplug_request_end")) == 1


def test_a_plugin_with_a_misspelt_hook_does_not_spoil_the_next(manager):
    class Misspelt:
        @hookimpl
        def specplug_beginn(self):
            pass

    with pytest.raises(PluginError, match="specplug_beginn"):
        manager.add(Misspelt())
    manager.add(SimpleNamespace(specplug_proposers=hookimpl(lambda: [spec("fine")])))
    assert named(manager) == ["fine"]


def test_no_spec_of_a_plugin_counts_when_one_is_wrong(manager):
    plugin = SimpleNamespace(specplug_proposers=hookimpl(lambda: [spec("good"), "wrong"]))
    with pytest.raises(PluginError, match="'wrong'"):
        manager.add(plugin, entry="p")
    assert named(manager) == []
    assert manager.implementations("specplug_proposers") == []


@pytest.mark.parametrize("plugin", [None, 5, "text", Silent, Silent(), [spec()]])
def test_adding_something_else_is_refused_and_can_be_mended(manager, plugin):
    with pytest.raises(PluginError, match="not a plugin"):
        manager.add(plugin, entry="same")
    manager.add(SimpleNamespace(specplug_proposers=hookimpl(lambda: [spec("ok")])), entry="same")
    assert named(manager) == ["ok"]


@pytest.mark.parametrize("again", ["the same object", "another object"])
def test_an_entry_taken_is_refused_and_keeps_its_plugin(manager, again):
    def plugin():
        return SimpleNamespace(
            specplug_proposers=hookimpl(lambda: [spec("ok")]),
            specplug_request_end=hookimpl(lambda request_id: None),
        )

    first = plugin()
    manager.add(first, entry="taken")
    with pytest.raises(PluginError, match="taken"):
        manager.add(first if again == "the same object" else plugin(), entry="taken")
    assert len(manager.observers("specplug_request_end")) == 1
    assert named(manager) == ["ok"]


# -- blocking -------------------------------------------------------------------------------


@pytest.fixture
def blockable(install, healthy):
    install(
        "dist",
        entries={"a": "blocked_m:SPEC", "b": "open_m:SPEC"},
        blocked_m=SPEC.format(name="pa", summary=""),
        open_m=SPEC.format(name="pb", summary=""),
    )


@pytest.mark.parametrize(
    ("block", "left"),
    [("dist", set()), ("dist:a", {"pb"}), (" dist:b , other", {"pa"}), ("a", {"pa", "pb"})],
)
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_block_by_distribution_or_entry(blockable, monkeypatch, block, left, by):
    if by == "environment":
        monkeypatch.setenv("SPECPLUG_BLOCK", block)
        manager = PluginManager()
    else:
        manager = PluginManager(block.split(","))
    assert set(named(manager)) & {"pa", "pb"} == left
    assert {str(origin) for origin in manager.blocked} == {
        f"dist 1.0 ({entry})" for entry, name in (("a", "pa"), ("b", "pb")) if name not in left
    }
    assert "ok" in named(manager)


def test_what_is_blocked_is_not_even_imported(install):
    install("bomb", entries={"e": "bomb_m:SPEC"}, bomb_m="raise SystemExit('imported')")
    assert not PluginManager(block=["bomb"]).problems


def test_the_argument_replaces_the_environment(blockable, monkeypatch):
    monkeypatch.setenv("SPECPLUG_BLOCK", "dist")
    assert {"pa", "pb"} <= set(named(PluginManager(block=[])))


# -- names ----------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_names_and_suggests_the_nearest(manager):
    manager.add(spec("suffix"))
    manager.add(spec("ngram"))
    with pytest.raises(UnknownProposerError) as error:
        manager.get("sufix")
    text = str(error.value)
    assert "'sufix'" in text
    assert "Did you mean 'suffix'?" in text
    assert "ngram, suffix" in text
    assert isinstance(error.value, LookupError)


def test_an_unknown_name_without_any_proposer(manager):
    with pytest.raises(UnknownProposerError, match="Registered are: none"):
        manager.get("x")


@pytest.mark.parametrize("name", ["a", "ngram", "my_2nd", "a__"])
def test_good_names(name):
    assert spec(name).name == name


@pytest.mark.parametrize("name", ["", "A", "nGram", "1st", "_x", "a-b", "a.b", "a b", "é", "a\n"])
def test_bad_names_are_refused(name):
    with pytest.raises(OptionError, match="cannot be the name"):
        spec(name)


def test_decorated_function_stays_a_function_and_is_a_plugin(manager, make_batch):
    @proposer(summary="Own words.")
    def twice(tokens, max_tokens):
        "Ignored."
        return [int(tokens[-1])] * max_tokens

    assert twice([3], 2) == [3, 3]
    manager.add(twice)
    assert manager.get("twice").spec.summary == "Own words."
    made, _ = manager.create("twice", {}, frozenset())
    assert made.propose(make_batch([[1, 2], [7]], limits=[2, 1])) == [[2, 2], [7]]


def test_a_decorated_function_costs_only_the_row_it_fails_on(manager, make_batch):
    @proposer()
    def picky(tokens, max_tokens):
        if tokens[0] == 1:
            raise KeyError("no")
        return [5]

    manager.add(picky)
    made, _ = manager.create("picky", {}, frozenset())
    failed, fine = made.propose(make_batch([[1], [2]]))
    assert isinstance(failed, KeyError)
    assert fine == [5]


# -- making a proposer ----------------------------------------------------------------------


def test_a_capability_gap_names_both_sets(manager):
    manager.add(spec(needs=frozenset({Capability.LOGITS, Capability.HIDDEN_STATES})))
    gives = frozenset({Capability.LOGITS, Capability.REQUEST_OPTIONS})
    with pytest.raises(CapabilityError) as error:
        manager.create("tested", {}, gives)
    needed, given = str(error.value).split("does not provide")
    assert "hidden_states" in needed
    assert "logits" not in needed
    assert "logits, request_options" in given
    assert manager.create("tested", {}, frozenset(Capability))


@pytest.mark.parametrize("lacking", [Capability.DEVICE_TENSORS, Capability.DRAFT_PROBABILITIES])
def test_a_part_of_another_gets_what_is_on_the_host_and_drafts_tokens(
    manager, make_engine, lacking
):
    manager.add(spec(needs=frozenset({lacking})))
    engine = manager.with_parts(make_engine(provides=frozenset(Capability)))
    assert engine.provides == frozenset(Capability)
    assert engine.for_parts().provides == frozenset(Capability) - {
        Capability.DEVICE_TENSORS, Capability.DRAFT_PROBABILITIES,
    }  # fmt: skip
    with pytest.raises(CapabilityError, match=f"needs {lacking.value}"):
        engine.make_proposer("tested", {})


def test_a_capability_gap_with_an_engine_that_gives_nothing(manager):
    manager.add(spec(needs=frozenset({Capability.LOGITS})))
    with pytest.raises(CapabilityError, match="nothing beyond tokens"):
        manager.create("tested", {}, frozenset())


class Size(Options):
    size: int = Field(3, ge=1)


class Sized(Silent):
    def __init__(self, options):
        self.options = options


def test_the_factory_gets_validated_options(manager):
    manager.add(spec(factory=Sized, options=Size))
    made, made_spec = manager.create("tested", {"size": 5}, frozenset())
    assert made.options == Size(size=5)
    assert made_spec.name == "tested"
    assert manager.create("tested", {}, frozenset())[0].options == Size()
    with pytest.raises(OptionError, match=r"'sise'.*Did you mean 'size'"):
        manager.create("tested", {"sise": 5}, frozenset())


def test_a_factory_may_be_a_string(manager, install):
    install(
        "lib", entries={}, lib_m=SPEC.format(name="unused", summary="") + "make = lambda o: P()"
    )
    manager.add(spec(factory="lib_m:make"))
    assert type(manager.create("tested", {}, frozenset())[0]).__name__ == "P"


def test_a_factory_whose_module_is_missing_gives_the_install_hint(manager):
    manager.add(spec(factory="no_such_module_x:F", install_hint="pip install thing."))
    with pytest.raises(DependencyError) as error:
        manager.create("tested", {}, frozenset())
    assert isinstance(error.value, ImportError)
    assert "no_such_module_x" in str(error.value)
    assert "pip install thing." in str(error.value)


@pytest.mark.parametrize("factory", ["specplug.errors:NoSuch", "specplug.errors"])
def test_a_factory_whose_attribute_is_missing_names_it(manager, factory):
    manager.add(spec(factory=factory))
    with pytest.raises(PluginError, match=factory):
        manager.create("tested", {}, frozenset())


@pytest.mark.parametrize("made", [None, 5, object(), Silent])
def test_a_factory_that_makes_something_else(manager, made):
    manager.add(spec(factory=lambda _: made))
    with pytest.raises(PluginError, match=r"'tested' \(this process \(tested\)\).*not a specplug"):
        manager.create("tested", {}, frozenset())


# -- the options hook -----------------------------------------------------------------------


def options_plugin(function):
    return SimpleNamespace(specplug_options=hookimpl(function))


def test_options_hooks_are_chained(manager):
    manager.add(spec(factory=Sized, options=Size))
    manager.add(options_plugin(lambda name, options: {"size": options["size"] + 1}))
    manager.add(options_plugin(lambda options: {"size": options["size"] + 10}))
    made, _ = manager.create("tested", {"size": 5}, frozenset())
    assert made.options.size == 16


def test_an_options_hook_that_returns_none_changes_nothing(manager):
    seen = []
    manager.add(spec(factory=Sized, options=Size))
    manager.add(options_plugin(lambda name, options: seen.append((name, dict(options)))))
    made, _ = manager.create("tested", {"size": 5}, frozenset())
    assert made.options.size == 5
    assert seen == [("tested", {"size": 5})]


def test_an_options_hook_may_take_all_options_away(manager):
    manager.add(spec(factory=Sized, options=Size))
    manager.add(options_plugin(lambda options: {}))
    made, _ = manager.create("tested", {"size": 5}, frozenset())
    assert made.options.size == Size().size


def test_what_an_options_hook_returns_is_validated(manager):
    manager.add(spec(factory=Sized, options=Size))
    manager.add(options_plugin(lambda options: {"size": 0}))
    with pytest.raises(OptionError, match="'size'"):
        manager.create("tested", {}, frozenset())


def test_an_options_hook_that_raises_is_named():
    class Watcher:
        @hookimpl
        def specplug_options(self, name, options):
            raise KeyError("no such thing")

    manager = PluginManager(discover=False)
    manager.add(ProposerSpec("p", factory=lambda options: None))
    manager.add(Watcher(), origin="watchers", entry="w")
    with pytest.raises(PluginError, match="watchers:w raised KeyError"):
        manager.create("p", {}, frozenset())
