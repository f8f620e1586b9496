-- All SQL of writer and readers, in one place under names; `-- name --` begins a statement.

-- claim_partition --
-- Become the owner: the earlier owner's next write finds another epoch and changes nothing.
insert into sink_partitions as p (topic, partition, epoch, next_offset) values ($1, $2, 1, 0)
on conflict (topic, partition) do update set epoch = p.epoch + 1
returning epoch, next_offset;

-- wait_for_locks --
-- Until the end of the transaction.
select set_config('lock_timeout', $1, true);

-- end_frozen_owner --
-- End the session whose open batch holds this row and waits for its client since long ago: in the middle of a COPY no
-- time-out of the server's runs. One that works, even for long, waits for no client. Only sinks of this same role.
select a.pid, a.application_name, pg_terminate_backend(a.pid) as ended
from sink_partitions p join pg_stat_activity a on a.backend_xid = p.xmax
where p.topic = $1 and p.partition = $2 and a.usename = session_user and a.application_name like 'onepen-sink%'
    and a.wait_event_type = 'Client' and a.xact_start < clock_timestamp() - make_interval(secs => $3::float8);

-- limits_of_a_writer --
-- A host that is lost is found out within half a minute; from PostgreSQL 17 on no transaction stays for ever, though it
-- may take as long as erasing the largest session.
select set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
    set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '30s', false),
    case when current_setting('server_version_num')::int >= 170000
        then set_config('transaction_timeout', '90min', false) end;

-- advance_partitions --
-- First statement of every batch; a missing row means that somebody else wrote or owns that partition.
update sink_partitions p set next_offset = b.next_offset
from unnest($1::text[], $2::integer[], $3::bigint[], $4::bigint[], $5::bigint[])
    as b (topic, partition, epoch, first_offset, next_offset)
where p.topic = b.topic and p.partition = b.partition and p.epoch = b.epoch and p.next_offset = b.first_offset
returning p.topic, p.partition;

-- read_partition --
select epoch, next_offset from sink_partitions where topic = $1 and partition = $2;

-- stored_runs --
select r.*, s.session_key from agent_runs r join agent_sessions s on s.id = r.session_id
where r.run_key = any($1::text[]);

-- stored_actions --
select a.*, s.session_key
from unnest($1::bigint[], $2::text[], $3::text[], $4::text[]) as k (tenant_id, session_key, action_name, action_key)
join agent_sessions s on s.tenant_id = k.tenant_id and s.session_key = k.session_key
join agent_actions a on a.session_id = s.id and a.action_name = k.action_name and a.action_key = k.action_key;

-- put_sessions --
-- First of all rows, in key order: its locks keep the writer of the other topic away from these sessions until this
-- batch is written. Events and receipts both make sessions, in any order: every column is a least, a greatest or the
-- first one known, and an erased session has neither user nor title.
insert into agent_sessions as s (tenant_id, session_key, created_at, updated_at, user_id, title, erased_at)
select * from unnest(
    $1::bigint[], $2::text[], $3::timestamptz[], $4::timestamptz[], $5::bigint[], $6::text[], $7::timestamptz[]
)
on conflict (tenant_id, session_key) do update set
    created_at = least(s.created_at, excluded.created_at),
    updated_at = greatest(s.updated_at, excluded.updated_at),
    erased_at = least(s.erased_at, excluded.erased_at),
    user_id = case when s.erased_at is null and excluded.erased_at is null
        then coalesce(s.user_id, excluded.user_id) end,
    title = case when s.erased_at is null and excluded.erased_at is null then coalesce(s.title, excluded.title) end
returning id, tenant_id, session_key, erased_at is not null as erased;

-- new_run_ids --
select nextval(pg_get_serial_sequence('agent_runs', 'id')) as id from generate_series(1, $1::int);

-- staging_table --
create temporary table if not exists staged_events (
    session_id bigint, run_id bigint, tenant_id bigint, seq bigint, event_type text, payload jsonb, raw bytea,
    generation bigint, cause_partition integer, cause_offset bigint, cause_index integer, prev_hash bytea,
    hash bytea, log_partition integer, log_offset bigint, created_at timestamptz
) on commit delete rows;

-- append_events --
-- An event is never edited: a repeated one changes nothing.
insert into agent_run_events (
    session_id, run_id, tenant_id, seq, event_type, payload, raw, generation, cause_partition, cause_offset,
    cause_index, prev_hash, hash, log_partition, log_offset, created_at
)
select * from staged_events
on conflict (session_id, run_id, seq) do nothing;

-- put_runs --
-- Called twice: first the runs that left the active set, then those that are in it. Rows only move forward.
insert into agent_runs as r (
    id, session_id, tenant_id, run_key, run_no, status, generation, attempt, lease_owner, lease_expires_at,
    timeout_at, cancel_requested_at, cancel_reason, terminal_status, terminal_at, terminal_reason, retryable,
    forced, input_id, input_mode, input_partition, input_offset, user_id, source, last_seq, last_hash, created_at,
    updated_at, recovery, lineage, retry_of, parent_session_key, parent_run_key, parent_call_id
)
select * from unnest(
    $1::bigint[], $2::bigint[], $3::bigint[], $4::text[], $5::bigint[], $6::text[], $7::bigint[], $8::integer[],
    $9::text[], $10::timestamptz[], $11::timestamptz[], $12::timestamptz[], $13::text[], $14::text[],
    $15::timestamptz[], $16::text[], $17::boolean[], $18::boolean[], $19::text[], $20::text[], $21::integer[],
    $22::bigint[], $23::bigint[], $24::text[], $25::bigint[], $26::bytea[], $27::timestamptz[], $28::timestamptz[],
    $29::text[], $30::text[], $31::text[], $32::text[], $33::text[], $34::text[]
)
on conflict (run_key) do update set
    status = excluded.status, generation = excluded.generation, attempt = excluded.attempt,
    lease_owner = excluded.lease_owner, lease_expires_at = excluded.lease_expires_at,
    timeout_at = excluded.timeout_at, cancel_requested_at = excluded.cancel_requested_at,
    cancel_reason = excluded.cancel_reason, terminal_status = excluded.terminal_status,
    terminal_at = excluded.terminal_at, terminal_reason = excluded.terminal_reason,
    retryable = excluded.retryable, forced = excluded.forced, input_id = excluded.input_id,
    input_mode = excluded.input_mode, input_partition = excluded.input_partition,
    input_offset = excluded.input_offset, user_id = excluded.user_id, source = excluded.source,
    recovery = excluded.recovery, lineage = excluded.lineage, retry_of = excluded.retry_of,
    parent_session_key = excluded.parent_session_key, parent_run_key = excluded.parent_run_key,
    parent_call_id = excluded.parent_call_id,
    last_seq = excluded.last_seq, last_hash = excluded.last_hash, updated_at = excluded.updated_at
where r.last_seq < excluded.last_seq;

-- put_inputs --
-- Verdict and disposition come in their own receipts; what stands first of a kind stays.
insert into agent_inputs as i (
    input_partition, input_offset, session_id, tenant_id, input_id, mode, user_id, source,
    verdict, verdict_reason, verdict_run_key, verdict_detail, verdict_at,
    disposition, disposition_reason, disposition_run_key, disposition_detail, disposition_at
)
select * from unnest(
    $1::integer[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[], $6::text[], $7::bigint[], $8::text[],
    $9::text[], $10::text[], $11::text[], $12::jsonb[], $13::timestamptz[],
    $14::text[], $15::text[], $16::text[], $17::jsonb[], $18::timestamptz[]
)
on conflict (input_partition, input_offset) do update set
    input_id = coalesce(i.input_id, excluded.input_id),
    mode = coalesce(i.mode, excluded.mode),
    user_id = coalesce(i.user_id, excluded.user_id),
    source = coalesce(i.source, excluded.source),
    verdict = coalesce(i.verdict, excluded.verdict),
    verdict_reason = case when i.verdict is null then excluded.verdict_reason else i.verdict_reason end,
    verdict_run_key = case when i.verdict is null then excluded.verdict_run_key else i.verdict_run_key end,
    verdict_detail = case when i.verdict is null then excluded.verdict_detail else i.verdict_detail end,
    verdict_at = coalesce(i.verdict_at, excluded.verdict_at),
    disposition = coalesce(i.disposition, excluded.disposition),
    disposition_reason =
        case when i.disposition is null then excluded.disposition_reason else i.disposition_reason end,
    disposition_run_key =
        case when i.disposition is null then excluded.disposition_run_key else i.disposition_run_key end,
    disposition_detail =
        case when i.disposition is null then excluded.disposition_detail else i.disposition_detail end,
    disposition_at = coalesce(i.disposition_at, excluded.disposition_at);

-- put_actions --
-- The row was read under the session's lock, and events and settlement merged into it: it only moves forward.
insert into agent_actions as a (
    session_id, tenant_id, action_name, action_key, run_key, state, args_digest, generation, requested_at,
    permitted_at, deadline_at, ended_at, reason, approval_requested_at, approval_expires_at, approval_decision,
    approval_by, approval_input_id, result, last_run_no, last_seq, last_offset, settled_state, settled_at,
    settled_offset, settled_by, settled_input_id, settled_worker_id
)
select * from unnest(
    $1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bigint[],
    $9::timestamptz[], $10::timestamptz[], $11::timestamptz[], $12::timestamptz[], $13::text[],
    $14::timestamptz[], $15::timestamptz[], $16::text[], $17::bigint[], $18::text[], $19::jsonb[], $20::bigint[],
    $21::bigint[], $22::bigint[], $23::text[], $24::timestamptz[], $25::bigint[], $26::bigint[], $27::text[],
    $28::text[]
)
on conflict (session_id, action_name, action_key) do update set
    run_key = excluded.run_key, state = excluded.state, args_digest = excluded.args_digest,
    generation = excluded.generation, requested_at = excluded.requested_at, permitted_at = excluded.permitted_at,
    deadline_at = excluded.deadline_at, ended_at = excluded.ended_at, reason = excluded.reason,
    approval_requested_at = excluded.approval_requested_at, approval_expires_at = excluded.approval_expires_at,
    approval_decision = excluded.approval_decision, approval_by = excluded.approval_by,
    approval_input_id = excluded.approval_input_id, result = excluded.result,
    last_run_no = excluded.last_run_no, last_seq = excluded.last_seq, last_offset = excluded.last_offset,
    settled_state = excluded.settled_state, settled_at = excluded.settled_at,
    settled_offset = excluded.settled_offset, settled_by = excluded.settled_by,
    settled_input_id = excluded.settled_input_id, settled_worker_id = excluded.settled_worker_id
where (a.last_run_no, a.last_seq) <= (excluded.last_run_no, excluded.last_seq);

-- put_subtasks --
-- Start and end each fill their columns once.
insert into agent_subtasks as t (
    session_id, tenant_id, run_key, call_id, child_session_key, child_input_id, child_run_key, status, reason, result,
    started_at, ended_at
)
select * from unnest(
    $1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
    $10::jsonb[], $11::timestamptz[], $12::timestamptz[]
)
on conflict (session_id, run_key, call_id) do update set
    child_session_key = coalesce(t.child_session_key, excluded.child_session_key),
    child_input_id = coalesce(t.child_input_id, excluded.child_input_id),
    child_run_key = coalesce(t.child_run_key, excluded.child_run_key),
    status = coalesce(t.status, excluded.status),
    reason = coalesce(t.reason, excluded.reason),
    result = coalesce(t.result, excluded.result),
    started_at = coalesce(t.started_at, excluded.started_at),
    ended_at = coalesce(t.ended_at, excluded.ended_at);

-- put_checkpoints --
insert into agent_checkpoints (
    session_id, tenant_id, run_key, run_no, seq, uri, digest, size_bytes, through_seq, created_at
)
select * from unnest(
    $1::bigint[], $2::bigint[], $3::text[], $4::bigint[], $5::bigint[], $6::text[], $7::text[], $8::bigint[],
    $9::bigint[], $10::timestamptz[]
)
on conflict (session_id, run_key, seq) do nothing;

-- put_refused_reports --
insert into agent_refused_reports (
    record_partition, record_offset, session_id, tenant_id, run_key, generation, worker_id, record, report_no,
    reason, detail, input_id, created_at
)
select * from unnest(
    $1::integer[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[], $7::text[], $8::text[],
    $9::bigint[], $10::text[], $11::jsonb[], $12::text[], $13::timestamptz[]
)
on conflict (record_partition, record_offset) do nothing;

-- pointing_events --
-- Stored events of these sessions that may point to objects.
select s.tenant_id, s.session_key, e.event_type, e.payload, e.raw
from agent_run_events e join agent_sessions s on s.id = e.session_id
where e.session_id = any($1::bigint[]) and e.event_type = any($2::text[])
    and e.payload ?| array['pointer', 'checkpoint'];

-- erase_events --
delete from agent_run_events where session_id = any($1::bigint[]);

-- erase_runs --
delete from agent_runs where session_id = any($1::bigint[]);

-- erase_actions --
delete from agent_actions where session_id = any($1::bigint[]);

-- erase_subtasks --
delete from agent_subtasks where session_id = any($1::bigint[]);

-- erase_checkpoints --
delete from agent_checkpoints where session_id = any($1::bigint[]);

-- erase_refused_reports --
delete from agent_refused_reports where session_id = any($1::bigint[]);

-- erase_inputs --
-- What remains says who erased the session, and when.
delete from agent_inputs where session_id = any($1::bigint[]) and mode is distinct from 'erase';

-- put_objects_to_delete --
insert into agent_objects_to_delete (session_id, tenant_id, uri_sha256, uri)
select * from unnest($1::bigint[], $2::bigint[], $3::bytea[], $4::text[])
on conflict (session_id, uri_sha256) do nothing;

-- objects_to_delete --
select o.session_id, o.tenant_id, s.session_key, o.uri_sha256, o.uri,
    s.erased_at < now() - make_interval(secs => $4::float8) as is_last
from agent_objects_to_delete o join agent_sessions s on s.id = o.session_id
where o.refused is null and (o.session_id, o.uri_sha256) > ($1::bigint, $2::bytea)
order by o.session_id, o.uri_sha256
limit $3;

-- object_is_gone --
delete from agent_objects_to_delete where session_id = $1 and uri_sha256 = $2;

-- object_is_refused --
update agent_objects_to_delete set refused = $3 where session_id = $1 and uri_sha256 = $2;

-- active_run_of_session --
-- For the alarm of only_one_active_run_per_session: who holds the place.
select run_key from agent_runs
where session_id = $1 and status in ('running', 'compacting', 'cancelling');

-- see_tenant --
-- Row level security shows a reader this tenant's rows until the transaction ends.
select set_config('onepen.tenant_id', $1, true);

-- list_sessions --
select s.tenant_id, s.session_key, s.user_id, s.title, s.created_at, s.updated_at, s.erased_at, s.id,
    (select max(run_no) from agent_runs r where r.session_id = s.id) as runs,
    (select run_key from agent_runs r
     where r.session_id = s.id and r.status in ('running', 'compacting', 'cancelling')) as active_run,
    (select status from agent_runs r where r.session_id = s.id order by run_no desc limit 1) as last_status
from agent_sessions s
where s.tenant_id = $1
    and ($2::timestamptz is null or (s.updated_at, s.id) < ($2, $3::bigint))
order by s.updated_at desc, s.id desc
limit $4;

-- get_session --
select s.tenant_id, s.session_key, s.user_id, s.title, s.created_at, s.updated_at, s.erased_at, s.id,
    (select max(run_no) from agent_runs r where r.session_id = s.id) as runs,
    (select run_key from agent_runs r
     where r.session_id = s.id and r.status in ('running', 'compacting', 'cancelling')) as active_run,
    (select status from agent_runs r where r.session_id = s.id order by run_no desc limit 1) as last_status
from agent_sessions s
where s.tenant_id = $1 and s.session_key = $2;

-- undisposed_inputs --
select count(*) from agent_inputs i join agent_sessions s on s.id = i.session_id
where s.tenant_id = $1 and s.session_key = $2 and i.disposition is null;

-- list_runs --
select r.*, s.session_key from agent_runs r join agent_sessions s on s.id = r.session_id
where r.tenant_id = $1
    and ($2::text is null or s.session_key = $2)
    and ($3::text[] is null or r.status = any($3))
    and ($4::timestamptz is null or (r.created_at, r.id) < ($4, $5::bigint))
order by r.created_at desc, r.id desc
limit $6;

-- get_run --
select r.*, s.session_key from agent_runs r join agent_sessions s on s.id = r.session_id
where r.tenant_id = $1 and r.run_key = $2;

-- get_run_by_number --
select r.*, s.session_key from agent_runs r join agent_sessions s on s.id = r.session_id
where r.tenant_id = $1 and s.session_key = $2 and r.run_no = $3;

-- actions_of_run --
select a.*, s.session_key from agent_actions a join agent_sessions s on s.id = a.session_id
where a.tenant_id = $1 and a.run_key = $2
order by a.requested_at, a.action_name, a.action_key
limit $3;

-- subtasks_of_run --
select t.*, s.session_key from agent_subtasks t join agent_sessions s on s.id = t.session_id
where t.tenant_id = $1 and t.run_key = $2
order by t.started_at, t.call_id
limit $3;

-- refused_of_run --
select f.*, s.session_key from agent_refused_reports f join agent_sessions s on s.id = f.session_id
where f.tenant_id = $1 and f.run_key = $2
order by f.record_offset
limit $3;

-- inputs_by_id --
select i.*, s.session_key from agent_inputs i join agent_sessions s on s.id = i.session_id
where i.tenant_id = $1 and i.input_id = $2 and ($3::text is null or s.session_key = $3)
order by s.session_key, i.input_offset
limit $4;

-- inputs_of_session --
select i.*, s.session_key from agent_inputs i join agent_sessions s on s.id = i.session_id
where i.tenant_id = $1 and s.session_key = $2 and i.input_offset > $3
order by i.input_offset
limit $4;

-- inputs_in_limbo --
-- Conservation (protocol section 4): accepted inputs without a disposition in sessions that have no active run. At a
-- moment when the sink stands at the end of both topics there is none.
select i.*, s.session_key from agent_inputs i join agent_sessions s on s.id = i.session_id
where i.disposition is null and i.tenant_id = $1
    and not exists (
        select from agent_runs r
        where r.session_id = i.session_id and r.status in ('running', 'compacting', 'cancelling')
    )
order by i.input_partition, i.input_offset
limit $2;

-- session_events --
select r.run_key, r.run_no, s.session_key, e.* from agent_sessions s
join agent_runs r on r.session_id = s.id
join agent_run_events e on e.session_id = s.id and e.run_id = r.id
where s.tenant_id = $1 and s.session_key = $2 and (r.run_no, e.seq) > ($3::bigint, $4::bigint)
order by r.run_no, e.seq
limit $5;

-- run_events --
select r.run_key, r.run_no, s.session_key, e.* from agent_runs r
join agent_sessions s on s.id = r.session_id
join agent_run_events e on e.session_id = s.id and e.run_id = r.id
where r.tenant_id = $1 and r.run_key = $2 and e.seq > $3
order by e.seq
limit $4;
