"""What holds beside the session's own state: token keys, partition settings and the tenants' policies.

Policies enter through the log only. Admission uses the last one consumed; a run keeps the version it started under.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hmac import compare_digest

from onepen.processors import state_keys
from onepen.schemas import codec
from onepen.schemas.errors import Fatal, Invalid, Poison
from onepen.schemas.limits import PROTOCOL_VERSION
from onepen.schemas.policies import (
    DEFAULT_POLICY,
    DEFAULT_SETTINGS,
    PartitionSettings,
    Policy,
    PolicyRecord,
    parse_policy,
    parse_settings,
)

_POLICY_STATE_VERSION = 1


_TOKENS_KEPT = 16_384
"""Every record of a worker proves its token: those of the runs at work are computed once (about 300 bytes each)."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The named key of the tokens. The secret never leaves this object; its repr hides it."""

    name: str
    secret: bytes = field(repr=False)
    _tokens: dict[tuple[int, str, str, int], str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def token(self, tenant_id: int, session_id: str, run_id: str, generation: int) -> str:
        """The right to speak for (tenant, session, run, generation): an HMAC, so nothing random is decided."""
        right = (tenant_id, session_id, run_id, generation)
        known = self._tokens.get(right)
        if known is None:
            text = f"{tenant_id}/{generation}/{run_id}/{session_id}".encode()
            known = f"{self.name}.{hmac.digest(self.secret, text, hashlib.sha256).hex()[:40]}"
            if len(self._tokens) >= _TOKENS_KEPT:
                self._tokens.clear()
            self._tokens[right] = known
        return known

    def valid(self, token: str, tenant_id: int, session_id: str, run_id: str, generation: int) -> bool:
        """True for the token of exactly this right; compared in constant time."""
        right = (tenant_id, session_id, run_id, generation)
        expected = self._tokens.get(right) or self.token(*right)
        return compare_digest(expected.encode(), token.encode())


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything `decide` may know besides state, command and moment. One per partition; a value."""

    keys: Keys
    settings: PartitionSettings = DEFAULT_SETTINGS
    latest: Mapping[int, Policy] = field(default_factory=dict)
    versions: Mapping[tuple[int, int], Policy] = field(default_factory=dict)

    @classmethod
    def start(cls, keys: Keys) -> Rules:
        """The rules of a partition on which no policy record was consumed yet: the defaults."""
        return cls(keys)

    def policy(self, tenant_id: int) -> Policy:
        """The policy in force for admission."""
        return self.latest.get(tenant_id, DEFAULT_POLICY)

    def policy_at(self, tenant_id: int, version: int) -> Policy:
        """The policy a run was started under."""
        if version == DEFAULT_POLICY.version:
            return DEFAULT_POLICY
        return self.versions[tenant_id, version]

    def restored(self, records: Mapping[bytes, bytes]) -> Rules:
        """These rules with the policy records of the state topic. Raises `Fatal` on a version it does not know."""
        rules = self
        for key in sorted(records, key=lambda k: state_keys.policy_of(k) or (0, 0)):
            where = state_keys.policy_of(key)
            if where is None:
                continue
            _, version, body = codec.decode_state(records[key])
            if version != _POLICY_STATE_VERSION:
                raise Fatal(f"policy record of state version {version}; upgrade before going on")
            rules = _with(rules, where[0], where[1], body)
        return rules


def _with(rules: Rules, tenant_id: int, version: int, body: bytes) -> Rules:
    if tenant_id == 0:
        settings = parse_settings(body, version)
        if settings.protocol > PROTOCOL_VERSION:
            raise Fatal(f"protocol version {settings.protocol} is in force; this release speaks {PROTOCOL_VERSION}")
        return replace(rules, settings=settings)
    policy = parse_policy(body, version)
    return replace(
        rules,
        latest={**rules.latest, tenant_id: policy},
        versions={**rules.versions, (tenant_id, version): policy},
    )


def admit_policy(rules: Rules, record: PolicyRecord) -> tuple[Rules, dict[bytes, bytes]]:
    """Put a policy record in force: the new rules, and the state records to write.

    Raises `Poison` for the dead letter: `policy_not_newer` (an equal one changes nothing), `policy_invalid`,
    Raises `Fatal` when the record
    switches on a protocol version that this release does not speak.
    """
    known = rules.settings.version if record.tenant_id == 0 else rules.policy(record.tenant_id).version
    if record.version <= known:
        raise Poison("policy_not_newer", f"version {record.version}, in force {known}")
    if record.tenant_id < 0:
        raise Poison("policy_invalid", "tenant_id must not be negative")
    try:
        changed = _with(rules, record.tenant_id, record.version, record.body)
    except Invalid as error:
        raise Poison("policy_invalid", str(error)) from None
    if changed.settings.protocol < rules.settings.protocol:
        raise Poison("policy_invalid", "the protocol version never falls")
    key = state_keys.policy_key(record.tenant_id, record.version)
    return changed, {key: codec.encode_state(0, _POLICY_STATE_VERSION, record.body)}
