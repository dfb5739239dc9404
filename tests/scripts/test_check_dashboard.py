"""Every query of the dashboard is asked, and one that is refused is not passed over."""

import http.server
import json
import sys
import threading
import urllib.parse
from typing import ClassVar

import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import check_dashboard

from hybridkv.errors import UserError


class Prometheus(http.server.BaseHTTPRequestHandler):
    """Refuses queries that name ``bad``, has nothing on ``none``."""

    asked: ClassVar[list[str]] = []

    def do_GET(self):
        query = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)["query"][0]
        self.asked.append(query)
        found = [] if "none" in query else [{"metric": {}, "value": [0, "1"]}]
        self.send_response(400 if "bad" in query else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"result": found}, "error": "parse error"}).encode())

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def url():
    server = http.server.HTTPServer(("127.0.0.1", 0), Prometheus)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["check_dashboard.py", *argv])
    return check_dashboard.main()


def board(tmp_path, *queries):
    path = tmp_path / "board.json"
    panels = [{"title": query, "targets": [{"expr": query}]} for query in queries]
    path.write_text(json.dumps({"panels": [{"title": "a row", "type": "row"}, *panels]}))
    return str(path)


def test_the_shipped_dashboard_is_asked_whole_with_its_variables_filled(url, monkeypatch, capsys):
    Prometheus.asked.clear()
    assert run(monkeypatch, "--prometheus", url, "--job", "mine", "--interval", "7m") == 0
    targets = [
        target
        for panel in json.loads(check_dashboard.DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    assert len(Prometheus.asked) == len(targets) > 50
    assert not any("$" in query for query in Prometheus.asked)
    assert all('job=~"mine"' in query for query in Prometheus.asked)
    assert any("[7m]" in query for query in Prometheus.asked)
    assert f"{len(targets)} with data" in capsys.readouterr().out


def test_a_refused_query_is_an_error_and_one_without_data_is_told(
    url, monkeypatch, tmp_path, capsys
):
    path = board(tmp_path, "fine", "none", "bad")
    assert run(monkeypatch, "--prometheus", url, "--dashboard", path) == 1
    said = capsys.readouterr().out
    assert "1 with data, 1 without, 1 refused" in said
    assert "parse error" in said


@pytest.mark.parametrize("argv", [("--prometheus", "localhost:9090"), ("--dashboard", "/none")])
def test_what_cannot_be_asked_is_one_line(url, monkeypatch, argv):
    with pytest.raises(UserError):
        run(monkeypatch, *argv)
