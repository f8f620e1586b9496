-- Two group roles without login; whoever administers the server grants them to login users.
--   onepen_sink    reads and writes the tables, owns none, applies no migration
--   onepen_reader  reads the rows of one tenant: that of the setting onepen.tenant_id, none when it is not set

do $$
declare
    wanted text;
begin
    foreach wanted in array array['onepen_sink', 'onepen_reader'] loop
        if not exists (select from pg_roles where rolname = wanted) then
            begin
                execute format('create role %I nologin', wanted);
            exception
                -- another database of this server is being migrated at the same time
                when duplicate_object or unique_violation then null;
            end;
        end if;
    end loop;
end
$$;

grant select, insert, update on all tables in schema public to onepen_sink;

revoke insert, update on schema_migrations from onepen_sink;

grant usage on all sequences in schema public to onepen_sink;

grant select on agent_sessions, agent_runs, agent_run_events, agent_inputs, agent_actions, agent_checkpoints,
    agent_refused_reports, sink_partitions to onepen_reader;

do $$
declare
    named text;
begin
    foreach named in array array['agent_sessions', 'agent_runs', 'agent_run_events', 'agent_inputs',
                                 'agent_actions', 'agent_checkpoints', 'agent_refused_reports'] loop
        execute format('alter table %I enable row level security', named);
        execute format('create policy sink_writes_all on %I to onepen_sink using (true) with check (true)', named);
        execute format(
            'create policy readers_see_their_tenant on %I for select to onepen_reader '
            'using (tenant_id = nullif(current_setting(''onepen.tenant_id'', true), '''')::bigint)', named);
    end loop;
end
$$;

