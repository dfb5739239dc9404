"""The dashboard names the metrics that there are, all of them, in a form that Grafana takes."""

import copy
import json
import re

import jsonschema
import pytest
from grafana_foundation_sdk.cog import encoder
from grafana_foundation_sdk.models import dashboard as grafana

from hybridkv.observe import dashboard
from hybridkv.observe.metric import Type
from hybridkv.observe.rollout_metrics import ROLLOUT_METRICS
from hybridkv.observe.table import AGE
from hybridkv.observe.table import METRICS as ENGINE_METRICS

METRICS = (*ENGINE_METRICS, *ROLLOUT_METRICS)
SERIES = {AGE} | {
    name
    for metric in METRICS
    for name in (
        [f"{metric.name}_{part}" for part in ("bucket", "count", "sum")]
        if metric.type is Type.HISTOGRAM
        else [metric.name]
    )
}


@pytest.fixture(scope="module")
def stored(repository):
    return json.loads((repository / "docs" / "dashboards" / "hybridkv.json").read_text())


@pytest.fixture(scope="module")
def schema(repository):
    path = repository / "tests" / "data" / "grafana_dashboard.schema.json"
    found = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def queries(board):
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def test_the_stored_dashboard_is_the_one_that_the_table_gives(stored):
    assert stored == dashboard.dashboard(), "run python -m hybridkv.observe.dashboard"


def test_no_panel_names_a_metric_that_does_not_exist(stored):
    named = {name for query in queries(stored) for name in re.findall(r"hybridkv_\w+", query)}
    variables = json.dumps(stored["templating"])
    named |= set(re.findall(r"hybridkv_\w+", variables))
    assert named - SERIES == set()


def test_every_metric_is_on_a_panel_of_its_own_with_its_help(stored):
    panels = [panel for panel in stored["panels"] if panel["type"] != "row"]
    for metric in METRICS:
        titled = [p for p in panels if p["title"] == dashboard.title(metric.name)]
        assert len(titled) == 1, metric.name
        assert titled[0]["description"] == metric.help
        assert all(metric.name in target["expr"] for target in titled[0]["targets"])
    assert len(panels) == len(METRICS) + 1


def test_labels_in_legends_are_those_of_the_metric(stored):
    by_title = {dashboard.title(metric.name): metric for metric in METRICS}
    for panel in stored["panels"]:
        metric = by_title.get(panel["title"])
        if metric is None or panel["type"] == "row":
            continue
        for target in panel["targets"]:
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend == set(metric.labels), metric.name


def test_panels_do_not_overlap_and_ids_are_unique(stored):
    taken, ids = set(), [panel["id"] for panel in stored["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in stored["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_dashboard_is_valid_and_the_schema_refuses_what_is_not(stored, schema):
    schema.validate(stored)
    for spoil in (
        lambda board: board.pop("title"),
        lambda board: board["panels"][1].pop("targets"),
        lambda board: board["panels"][1]["gridPos"].update(w=25),
        lambda board: board["panels"][1]["targets"][0].update(expr=""),
        lambda board: board["panels"][1].update(type="graph of things"),
        lambda board: board["templating"]["list"][1].update(type="guess"),
        lambda board: board.update(schemaVersion="39"),
    ):
        board = copy.deepcopy(stored)
        spoil(board)
        assert not schema.is_valid(board)


def test_alarms_are_of_metrics_that_exist(repository):
    text = (repository / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`(hybridkv_\w+)", text))
    assert len(named) > 20
    assert named - SERIES - {metric.name for metric in METRICS} == set()


def test_grafanas_own_classes_keep_all_of_it(stored):
    """A field that they do not know would be gone after a round through them."""
    read = grafana.Dashboard.from_json(copy.deepcopy(stored))
    written = json.loads(encoder.JSONEncoder().encode(read))
    lost = [path for path in paths(stored) if path not in set(paths(written))]
    # The editor's copy of a variable's query, in Grafana's interface but not in its classes.
    assert [path for path in lost if path[-2:-1] != ("definition",)] == []
    misspelt = copy.deepcopy(stored)
    misspelt["panels"][1]["gridpos"] = misspelt["panels"][1].pop("gridPos")
    written = json.loads(encoder.JSONEncoder().encode(grafana.Dashboard.from_json(misspelt)))
    assert "gridpos" not in written["panels"][1]


def paths(tree, at=()):
    """Every leaf with the way to it."""
    if isinstance(tree, dict):
        return [found for key in tree for found in paths(tree[key], (*at, key))]
    if isinstance(tree, list):
        return [found for key, x in enumerate(tree) for found in paths(x, (*at, key))]
    return [(*at, tree)]
