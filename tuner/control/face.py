"""The controller's own face: health, metrics, status, a log line an outcome, and pause, resume and revert over HTTP.

The loop calls ``publish`` after each cycle and reads what people asked for through ``rooftune.tuner.control.wishes``.
"""

import sys
import threading
from importlib.metadata import version
from typing import Any, TextIO

from rooftune.policies.errors import UnreachableError
from rooftune.tuner.clock import Clock
from rooftune.tuner.config import Config, TokenFile
from rooftune.tuner.config.values import split_listen
from rooftune.tuner.control import wishes
from rooftune.tuner.control.face_http import Answer, Ask, PageServer, Routes
from rooftune.tuner.control.face_log import EventLog, Level, Value, level_of, outcome_fields
from rooftune.tuner.control.face_series import CONTENT_TYPE, Series
from rooftune.tuner.control.face_view import About, View
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.parts import Store

STATUS_SCHEMA = "rooftune.status"
STATUS_VERSION = 1
POLL_S = 0.1  # how soon the server notices that it shall end


class Face:
    """Pages and log of one controller. listen None: no pages, the log alone."""

    def __init__(
        self, about: About, store: Store, clock: Clock, log: EventLog, listen: str | None, token: TokenFile | None
    ) -> None:
        """Raises InputError when the address cannot be listened on or the token file cannot be used."""
        if token is not None:
            token.tokens()
        self._about, self._store, self._clock, self._log = about, store, clock, log
        self._view = View(about, clock)
        self._series = Series(self._view, store)
        self._server: PageServer | None = None
        self._thread: threading.Thread | None = None
        if listen is not None:
            host, port = split_listen(listen)
            self._server = PageServer(host, port, self._routes(token))
            serve = self._server.serve_forever
            self._thread = threading.Thread(target=serve, args=(POLL_S,), name="face", daemon=True)
            self._thread.start()

    @classmethod
    def of(cls, config: Config, store: Store, clock: Clock, stream: TextIO | None = None) -> "Face":
        """As the configuration says, its log on ``stream`` (default: standard error)."""
        about = About(
            config.engine.shown_name, config.mode, store.instance, config.cadence.cycle_s, version("rooftune")
        )
        log = EventLog(stream or sys.stderr, config.log.level, config.log.format)
        token = None if config.token_file is None else TokenFile(config.token_file)
        return cls(about, store, clock, log, config.listen, token)

    @property
    def port(self) -> int | None:
        """Where the pages are; None without them."""
        return None if self._server is None else self._server.port

    @property
    def actor(self) -> str:
        """The actor of every push."""
        return self._about.actor

    def publish(self, record: CycleRecord) -> None:
        """Show a cycle that has ended; never raises."""
        self._view.publish(record)
        self._log.write(self._clock.wall_s(), level_of(record), outcome_fields(record, self._about.actor))

    def say(self, event: str, text: str, level: Level = Level.INFO) -> None:
        """One line that is not a cycle: a start, an end, a state file moved aside."""
        self._log.write(self._clock.wall_s(), level, {"event": event, "detail": text})

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    # --- pages -----------------------------------------------------------------------------------

    def _routes(self, token: TokenFile | None) -> Routes:
        return Routes(
            {
                "/healthz": lambda: self._flag("healthy", self._view.glance().healthy),
                "/readyz": lambda: self._flag("ready", self._view.glance().ready),
                "/metrics": lambda: Answer(200, self._series.page(), CONTENT_TYPE),
                "/status": lambda: Answer(200, self.status()),
            },
            {
                "/pause": lambda ask: self._wish("pause", ask),
                "/resume": lambda ask: self._wish("resume", ask),
                "/revert": lambda ask: self._wish("revert", ask),
            },
            token,
        )

    def _flag(self, name: str, good: bool) -> Answer:
        since_s = round(self._view.glance().since_s, 3)
        return Answer(200 if good else 503, {name: good, "since_cycle_s": since_s})

    def status(self) -> dict[str, Any]:
        """What /status says: who, what people asked for, and the latest record."""
        seen = self._view.glance()
        asked: dict[str, Any] | None = None
        try:
            asked = wishes.read(self._store).model_dump(mode="json")
        except UnreachableError as error:
            asked = {"error": str(error)}
        return {
            "schema": STATUS_SCHEMA, "version": STATUS_VERSION, "engine": self._about.engine, "mode": self._about.mode,
            "instance": self._about.instance, "release": self._about.version, "healthy": seen.healthy,
            "ready": seen.ready, "since_cycle_s": round(seen.since_s, 3), "wishes": asked,
            "last": None if seen.record is None else seen.record.model_dump(mode="json", by_alias=True),
        }  # fmt: skip

    def _wish(self, kind: str, ask: Ask) -> Answer:
        actor, at_s = f"http:{ask.actor}", self._clock.wall_s()
        act = {"pause": wishes.pause, "resume": wishes.resume, "revert": wishes.ask_revert}[kind]
        try:
            wish = act(self._store, actor, ask.reason, at_s)
        except UnreachableError as error:
            return Answer(503, {"error": str(error)})
        fields: dict[str, Value] = {"event": kind, "actor": actor, "reason": ask.reason}
        self._log.write(at_s, Level.WARNING, fields)
        done = "at once" if kind == "pause" else "in the next cycle"
        return Answer(200 if kind == "pause" else 202, {"asked": kind, "wish": wish.id, "takes_effect": done})
