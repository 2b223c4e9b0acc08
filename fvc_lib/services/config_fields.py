"""Declare the fields of ``RunConfig``, the configuration of a run, and convert and check their values."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import yaml
from pydantic import AfterValidator, Field
from pydantic_core import CoreSchema, core_schema

from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import FEATURES, Registry
from fvc_lib.services.tasks import DATA_INDEX, KFOLD_RESULTS, TASKS

# The parts of a run that the value of a field may change:
#   data      the samples and their labels; checkpoints are bound to a digest of the samples, not to the value
#   weights   the trained weights; checkpoints are bound to the value
#   results   choices, reports or trainings next to a model, or whether a stage ends well
#   rounding  how sums are rounded
#   nothing   places of files, speed, memory
#   folder    the folder of the run itself
Changes = Literal["data", "weights", "results", "rounding", "nothing", "folder"]
TRAINED = ("data", "weights")
_SINGLE_STAGES = tuple(spec.stages[0].name for spec in TASKS.values() if len(spec.stages) == 1)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The attributes of a configuration field in addition to its type, default and description.

    A task is a learning problem (``video``, ``image`` or ``video_text``). A stage is one notebook of its pipeline.
    """

    changes: Changes
    tasks: tuple[str, ...]  # tasks that have a stage that reads the field
    stages: frozenset[str]  # stages whose result depends on the field
    hashed: bool  # whether the value is part of the run's hash
    resume: bool  # whether a run may be resumed with another value
    path: bool = False  # whether the value names a file or folder
    variable: str = ""  # the environment variable that sets the field
    content: bool = False  # whether hashes use the content of the named file instead of its path
    neutral: Any = ...  # a field with this value is left out of hashes and checkpoint bindings; ...: never left out


def field(
    default: Any,
    changes: Changes,
    description: str,
    tasks: Iterable[str] = tuple(TASKS),
    *,
    stages: Iterable[str] = (),
    **options: Any,
) -> Any:
    """Declare a field of ``RunConfig``.

    Args:
        default: the default value.
        changes: the part of a run that the value may change (see ``Changes``). It sets the defaults of ``hashed`` and
            ``resume``.
        description: the meaning in one line.
        tasks: names of the tasks that read the field.
        stages: names of the stages of task video whose results depend on the field. Some stages need not be named:
            stage 01 (data index) if ``changes`` is ``data``, and the stages that train if it is ``weights``. If it is
            ``results`` and no stage is named, stage 05 (results of all folds) is used.
        options: further attributes of ``Declaration``, and options of pydantic's ``Field`` such as ``ge=0``.
    """
    usual = (*stages, DATA_INDEX) if changes == "data" else tuple(stages)
    if changes == "results":
        usual = usual or (KFOLD_RESULTS,)
    options.setdefault("hashed", changes in (*TRAINED, "results"))
    options.setdefault("resume", changes in ("rounding", "nothing"))
    declared = {name: options.pop(name) for name in Declaration.__dataclass_fields__ if name in options}
    read_by = frozenset({*usual, *_SINGLE_STAGES})
    extra: dict[str, Any] = {"declaration": Declaration(changes, tuple(tasks), read_by, **declared)}
    return Field(default, description=description, json_schema_extra=extra, **options)


_COMMA = re.compile(r",(?![^{}]*\})")


def split_names(value: Any) -> Any:
    """Return the names in a text such as ``flip,noise`` or ``[flip, noise]`` as a tuple.

    A comma between braces does not split: ``{real,fake}/*.tar`` is one name. A list is returned as a tuple, and a value
    of any other type unchanged.
    """
    if isinstance(value, str):
        listed = value.strip()
        if listed.startswith("[") and listed.endswith("]"):
            listed = listed[1:-1]
        return tuple(name.strip(" '\"") for name in _COMMA.split(listed) if name.strip(" '\""))
    return tuple(value) if isinstance(value, list) else value


def split_pairs(value: Any) -> Any:
    """Return the pairs in ``value`` as a dict; names and labels become lower case.

    ``value`` is a text such as ``1=fake,0=real``, a mapping, or a sequence of pairs.

    Raises:
        ValueError: a name occurs twice; capitals make no difference.
    """
    if isinstance(value, str):
        value = [text.partition("=")[::2] for text in value.split(",") if text.strip()]
    pairs = list(value.items()) if isinstance(value, dict) else value
    mapped = {str(name).strip().lower(): str(label).strip().lower() for name, label in pairs}
    if len(mapped) < len(pairs):
        raise ValueError("a name is given twice, where capitals do not count; leave one of them")
    return mapped


class _OnceLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # a tenth of the time
    """A safe YAML loader that raises ``ValueError`` if a mapping has the same key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        names = [str(key.value) for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is given twice. Leave one of them")
        return super().construct_mapping(node, deep)


class _TextLoader(_OnceLoader):
    """A YAML loader that returns every unquoted value as text, except null, which becomes None.

    The rules of YAML 1.1 would convert 010 to 8, 1:30 to 90 and off to False.
    """

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml(text: str, origin: str, *, typed: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML ``text``; an empty dict for an empty text.

    Args:
        text: the YAML text.
        origin: words for the source of the text in error messages.
        typed: True: convert values by YAML's rules, as needed for text from ``RunConfig.to_yaml``. False: values stay
            text, which the fields convert like values of the command line.

    Raises:
        UsageError: the text is no valid YAML mapping, or has a name twice.
    """
    try:
        document = yaml.load(text, Loader=_OnceLoader if typed else _TextLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{origin} is not valid YAML: {error}") from error
    if not isinstance(document, dict | None):
        raise UsageError(f"{origin}: got a {type(document).__name__}, wanted lines like 'epochs: 20'.")
    return document or {}


@dataclasses.dataclass(frozen=True)
class NameIn:
    """An annotation for a field whose value names one item or several items of ``registry``, such as a model.

    ``or_else`` is one further text that the field accepts, such as an empty text; None: there is none.
    """

    registry: Registry[Any]
    or_else: str | None = None

    def _names(self, value: Any) -> list[str]:
        return [name for name in ([value] if isinstance(value, str) else value) if name != self.or_else]

    def check(self, value: Any) -> Any:
        """Check the name or names in ``value`` and return them; the path of a user's file is made absolute.

        Raises:
            UsageError: a name in ``value`` is not registered.
        """
        checked = [self.registry.check(name) for name in self._names(value)]
        return type(value)(checked) if not isinstance(value, str) else checked[0] if checked else value

    def load(self, value: Any) -> None:
        """Import the files that register the names in ``value``.

        Raises:
            UsageError: a file cannot be imported; the message has its path and the error.
        """
        for name in self._names(value):
            self.registry.get(name)

    def identity(self, value: Any) -> Any:
        """Return the form of ``value`` that goes into a run's hash.

        If ``value`` names a user's file, a digest of the file's code is added; else it is unchanged.
        """
        return self.registry.identity(value) if isinstance(value, str) else value

    def files(self, value: Any) -> list[str]:
        """Return the dotted names of the library's modules that register the names in ``value``.

        Names of users' files add nothing.
        """
        return [module for name in self._names(value) for module in self.registry.declared_in(name)]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


def wanted(fits: Callable[[Any], object], words: str) -> AfterValidator:
    """Return a pydantic validator that accepts a value if ``fits(value)`` is true.

    For any other value it raises ``ValueError``. ``words`` describe the accepted values in the message.
    """

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"wanted {words}")
        return value

    return AfterValidator(check)


def one_of(names: Iterable[str]) -> AfterValidator:
    """Return a pydantic validator that accepts a value only if it is in ``names``."""
    known = tuple(names)
    return wanted(known.__contains__, f"one of {', '.join(known)}")


def matching(pattern: str, words: str) -> AfterValidator:
    """Return a pydantic validator that accepts text only if all of it matches the regular expression ``pattern``.

    ``words`` describe the accepted text in the error message.
    """
    return wanted(re.compile(pattern).fullmatch, words)


def known_families(text: str) -> str:
    """Check the names of feature families in ``text``, and return them sorted and joined by commas.

    If ``all`` is among them, the result is ``all``.

    Raises:
        UsageError: a family is not registered.
    """
    names = set(split_names(text)) or {text}
    return "all" if "all" in names else ",".join(sorted(FEATURES.check(name) for name in names))


TUNE = r"head|norms|all|last:[1-9][0-9]*|effort(:[1-9][0-9]*)?"
TUNE_WORDS = "head, norms, last:N (the last N stages), effort (or effort:RANK) or all"
_NUMBER = r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"


def known_operating_point(text: str) -> str:
    """Check ``text``, the rule that chooses a decision threshold, and return it in lower case without spaces.

    Valid rules are ``best``, ``fpr=SHARE`` (a false positive rate inside (0, 1)) and ``cost=FALSE_ALARM:MISS`` (costs
    above 0 of the two errors).

    Raises:
        ValueError: the rule is invalid.
    """
    bare = text.lower().replace(" ", "")
    found = re.fullmatch(rf"best|fpr={_NUMBER}|cost={_NUMBER}:{_NUMBER}", bare)
    if not found or any(float(number) <= 0 for number in found.groups() if number) or float(found[1] or 0) >= 1:
        raise ValueError(
            "wanted best, fpr=SHARE inside (0, 1) such as fpr=0.01, or cost=FALSE_ALARM:MISS such as cost=5:1"
        )
    return bare
