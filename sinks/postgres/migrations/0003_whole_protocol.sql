-- The whole protocol: lineage and parents of runs, subtasks, actions settled after their run, erased sessions.
-- Columns of existing rows are filled from their events, so that they equal those of a rebuild.

alter table agent_sessions add column erased_at timestamptz;

comment on column agent_sessions.erased_at is
    'When the session was erased. Of an erased session only this row and the erase inputs remain, whatever comes later.';

alter table agent_runs
    add column recovery text,
    add column lineage text,
    add column retry_of text,
    add column parent_session_key text,
    add column parent_run_key text,
    add column parent_call_id text;

comment on column agent_runs.lineage is 'The run_key of the first run of a chain of retries; they share action keys.';

comment on column agent_runs.parent_run_key is 'The run that waits for this one as its subtask; null: none does.';

update agent_runs r set
    recovery = case when jsonb_typeof(e.payload -> 'recovery') = 'string' then e.payload ->> 'recovery' end,
    lineage = case when jsonb_typeof(e.payload -> 'lineage') = 'string' then e.payload ->> 'lineage' end,
    retry_of = case when jsonb_typeof(e.payload -> 'retryOf') = 'string' then e.payload ->> 'retryOf' end
from agent_run_events e
where e.session_id = r.session_id and e.run_id = r.id and e.seq = 1 and e.event_type = 'run.started';

alter table agent_actions
    add column last_offset bigint not null default -1,
    add column settled_state text,
    add column settled_at timestamptz,
    add column settled_offset bigint,
    add column settled_by bigint,
    add column settled_input_id text,
    add column settled_worker_id text;

comment on column agent_actions.last_offset is
    'Offset on the inputs topic of the record that caused the last event about the key; -1 before the first event.';

comment on column agent_actions.settled_state is
    'How an action in doubt ended, as an answer or a late report told after its run; state shows it too.';

update agent_actions a set last_offset = e.cause_offset
from agent_runs r, agent_run_events e
where r.run_key = a.run_key and r.run_no = a.last_run_no
    and e.session_id = r.session_id and e.run_id = r.id and e.seq = a.last_seq;

alter table agent_checkpoints add column run_no bigint;

update agent_checkpoints c set run_no = r.run_no from agent_runs r where r.run_key = c.run_key;

alter table agent_refused_reports add column input_id text;

comment on column agent_refused_reports.input_id is 'For record = ''notice'': the child''s input whose end came too late.';

create table agent_subtasks (
    session_id bigint not null references agent_sessions (id),
    tenant_id bigint not null,
    run_key text not null,
    call_id text not null,
    child_session_key text,
    child_input_id text,
    child_run_key text,
    status text,
    reason text,
    result jsonb,
    started_at timestamptz,
    ended_at timestamptz,
    primary key (session_id, run_key, call_id)
);

comment on table agent_subtasks is
    'One row per child that a run started, with what the child''s input came to; status null: the run waits for it.';

create table agent_objects_to_delete (
    session_id bigint not null references agent_sessions (id),
    tenant_id bigint not null,
    uri_sha256 bytea not null,
    uri text not null,
    refused text,
    primary key (session_id, uri_sha256)
);

comment on table agent_objects_to_delete is
    'Objects that events of erased sessions point to. A row goes when its object is gone; refused says why it will not.';

create index agent_subtasks_of_child_idx on agent_subtasks (tenant_id, child_session_key);

create index agent_subtasks_waited_for_idx on agent_subtasks (tenant_id, run_key) where status is null;

create index agent_runs_of_parent_idx on agent_runs (tenant_id, parent_run_key) where parent_run_key is not null;

create index agent_runs_of_lineage_idx on agent_runs (session_id, lineage);

create index agent_actions_in_doubt_idx on agent_actions (tenant_id, action_name) where state = 'in_doubt';

grant select, insert, update on agent_subtasks to onepen_sink;

grant select, insert, update, delete on agent_objects_to_delete to onepen_sink;

grant select on agent_subtasks, agent_objects_to_delete to onepen_reader;

do $$
declare
    named text;
begin
    foreach named in array array['agent_subtasks', 'agent_objects_to_delete'] loop
        execute format('alter table %I enable row level security', named);
        execute format('create policy sink_writes_all on %I to onepen_sink using (true) with check (true)', named);
        execute format(
            'create policy readers_see_their_tenant on %I for select to onepen_reader '
            'using (tenant_id = nullif(current_setting(''onepen.tenant_id'', true), '''')::bigint)', named);
    end loop;
    -- The sink may delete, but only what belongs to an erased session.
    foreach named in array array['agent_runs', 'agent_run_events', 'agent_inputs', 'agent_actions',
                                 'agent_checkpoints', 'agent_refused_reports', 'agent_subtasks'] loop
        execute format('grant delete on %I to onepen_sink', named);
        execute format(
            'create policy only_erased_sessions_lose_rows on %I as restrictive for delete to onepen_sink '
            'using (exists (select from agent_sessions s where s.id = %I.session_id and s.erased_at is not null))',
            named, named);
    end loop;
end
$$;
