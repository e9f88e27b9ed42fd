-- results.db as schema version 0001 wrote it: the text that sqlite3's .dump gives. Never change it.
BEGIN TRANSACTION;
CREATE TABLE artifact (
	trial_id INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	path TEXT NOT NULL, 
	sha256 TEXT, 
	CONSTRAINT pk_artifact PRIMARY KEY (trial_id, kind, path), 
	CONSTRAINT fk_artifact_trial_id_trial FOREIGN KEY(trial_id) REFERENCES trial (id) ON DELETE CASCADE
);
INSERT INTO "artifact" VALUES(1,'tokens','runs/tokens.parquet','2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881');
CREATE TABLE claim (
	sweep_id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	claimed DOUBLE, 
	measured DOUBLE, 
	ci_low DOUBLE, 
	ci_high DOUBLE, 
	n INTEGER, 
	verdict TEXT NOT NULL, 
	trial_ids JSON NOT NULL, 
	CONSTRAINT pk_claim PRIMARY KEY (sweep_id, name), 
	CONSTRAINT fk_claim_sweep_id_sweep FOREIGN KEY(sweep_id) REFERENCES sweep (id) ON DELETE CASCADE
);
INSERT INTO "claim" VALUES(1,'speedup',1.36,1.2,1.1,1.3,3,'fails','[1, 2]');
CREATE TABLE metric (
	trial_id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	label TEXT DEFAULT '' NOT NULL, 
	value DOUBLE, 
	unit TEXT NOT NULL, 
	n INTEGER, 
	n_unit TEXT, 
	ci_low DOUBLE, 
	ci_high DOUBLE, 
	limit_value DOUBLE, 
	CONSTRAINT pk_metric PRIMARY KEY (trial_id, name, label), 
	CONSTRAINT fk_metric_trial_id_trial FOREIGN KEY(trial_id) REFERENCES trial (id) ON DELETE CASCADE
);
INSERT INTO "metric" VALUES(1,'ttft_ms_p50','',12.5,'ms',2,'turns',10.0,14.0,NULL);
INSERT INTO "metric" VALUES(1,'power_w','',NULL,'W',NULL,NULL,NULL,NULL,NULL);
CREATE TABLE pensieve_schema_version (
	version_num TEXT NOT NULL, 
	CONSTRAINT pk_pensieve_schema_version PRIMARY KEY (version_num)
);
INSERT INTO "pensieve_schema_version" VALUES('0001');
CREATE TABLE sample (
	trial_id INTEGER NOT NULL, 
	at_s FLOAT NOT NULL, 
	device TEXT DEFAULT '' NOT NULL, 
	name TEXT NOT NULL, 
	value FLOAT, 
	unit TEXT NOT NULL, 
	CONSTRAINT fk_sample_trial_id_trial FOREIGN KEY(trial_id) REFERENCES trial (id) ON DELETE CASCADE
);
INSERT INTO "sample" VALUES(1,0.5,'gpu0','occupancy',3.0,'blocks');
CREATE TABLE sweep (
	id INTEGER NOT NULL, 
	"key" TEXT NOT NULL, 
	name TEXT NOT NULL, 
	experiment TEXT, 
	command TEXT, 
	overrides JSON NOT NULL, 
	n_expected INTEGER NOT NULL, 
	status TEXT NOT NULL, 
	host TEXT NOT NULL, 
	git_commit TEXT, 
	mlflow_run_id TEXT, 
	started_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	CONSTRAINT pk_sweep PRIMARY KEY (id), 
	CONSTRAINT uq_sweep_key UNIQUE ("key")
);
INSERT INTO "sweep" VALUES(1,'key','pensieve',NULL,'python runners/run.py -m','{"seed": "0", "baseline": "pensieve,stateless"}',2,'completed','a-host','abc',NULL,'2026-01-02 03:04:05.600000','2026-01-02 03:04:05.600000');
CREATE TABLE sweep_trial (
	sweep_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	job INTEGER NOT NULL, 
	reused BOOLEAN NOT NULL, 
	CONSTRAINT pk_sweep_trial PRIMARY KEY (sweep_id, job), 
	CONSTRAINT fk_sweep_trial_sweep_id_sweep FOREIGN KEY(sweep_id) REFERENCES sweep (id) ON DELETE CASCADE, 
	CONSTRAINT fk_sweep_trial_trial_id_trial FOREIGN KEY(trial_id) REFERENCES trial (id) ON DELETE CASCADE
);
INSERT INTO "sweep_trial" VALUES(1,1,0,0);
INSERT INTO "sweep_trial" VALUES(1,2,1,0);
CREATE TABLE trial (
	id INTEGER NOT NULL, 
	fingerprint TEXT NOT NULL, 
	config_hash TEXT NOT NULL, 
	code_hash TEXT NOT NULL, 
	platform TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	experiment TEXT, 
	model TEXT NOT NULL, 
	baseline TEXT NOT NULL, 
	eviction TEXT, 
	scheduler TEXT, 
	cache TEXT, 
	workload TEXT NOT NULL, 
	hardware TEXT NOT NULL, 
	seed INTEGER NOT NULL, 
	repeat INTEGER NOT NULL, 
	weights TEXT, 
	model_revision TEXT, 
	dtype TEXT, 
	device TEXT, 
	device_count INTEGER, 
	simulated BOOLEAN NOT NULL, 
	contended BOOLEAN NOT NULL, 
	gpu_tokens BIGINT, 
	cpu_tokens BIGINT, 
	gpu_bytes BIGINT, 
	cpu_bytes BIGINT, 
	kv_bytes_per_token BIGINT, 
	working_set_tokens BIGINT, 
	measure_start_s DOUBLE, 
	measure_end_s DOUBLE, 
	status TEXT NOT NULL, 
	error TEXT, 
	traceback TEXT, 
	host TEXT NOT NULL, 
	pid INTEGER NOT NULL, 
	process_started_at DATETIME NOT NULL, 
	heartbeat_at DATETIME NOT NULL, 
	started_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	git_commit TEXT, 
	mlflow_run_id TEXT, 
	config JSON NOT NULL, 
	environment JSON NOT NULL, 
	engine JSON NOT NULL, 
	flags JSON NOT NULL, 
	CONSTRAINT pk_trial PRIMARY KEY (id), 
	CONSTRAINT uq_trial_fingerprint_attempt UNIQUE (fingerprint, attempt)
);
INSERT INTO "trial" VALUES(1,'f0','c','d','sim',1,'pensieve','tiny','pensieve','retention_value','unified','demo','chat','cpu',0,0,'random',NULL,'float32',NULL,NULL,0,0,4096,2048,NULL,NULL,NULL,8200,NULL,NULL,'completed',NULL,NULL,'a-host',100,'2026-01-02 03:04:05.600000','2026-01-02 03:04:05.600000','2026-01-02 03:04:05.600000','2026-01-02 03:04:05.600000',NULL,NULL,'{"seed": 0, "model": {"name": "tiny"}}','{"python": "3.11"}','{"threads": 2}','{"load": "closed"}');
INSERT INTO "trial" VALUES(2,'f1','c','d','sim',1,'pensieve','tiny','stateless','retention_value','unified','demo','chat','cpu',0,0,'random',NULL,'float32',NULL,NULL,0,0,4096,2048,NULL,NULL,NULL,8200,NULL,NULL,'completed',NULL,NULL,'a-host',101,'2026-01-02 03:04:05.600000','2026-01-02 03:04:05.600000','2026-01-02 03:04:05.600000','2026-01-02 03:04:05.600000',NULL,NULL,'{"seed": 0, "model": {"name": "tiny"}}','{"python": "3.11"}','{"threads": 2}','{"load": "closed"}');
INSERT INTO "trial" VALUES(3,'f2','c','d','sim',1,'pensieve','tiny','pensieve','retention_value','unified','demo','chat','cpu',0,0,'random',NULL,'float32',NULL,NULL,0,0,4096,2048,NULL,NULL,NULL,8200,NULL,NULL,'failed','It broke; mend it.',NULL,'a-host',102,'2026-01-02 03:04:05.600000','2026-01-02 03:04:05.600000','2026-01-02 03:04:05.600000','2026-01-02 03:04:05.600000',NULL,NULL,'{"seed": 0, "model": {"name": "tiny"}}','{"python": "3.11"}','{"threads": 2}','{"load": "closed"}');
CREATE TABLE turn (
	id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	ordinal INTEGER NOT NULL, 
	session TEXT NOT NULL, 
	turn INTEGER NOT NULL, 
	iteration INTEGER NOT NULL, 
	label TEXT NOT NULL, 
	phase TEXT NOT NULL, 
	stream BOOLEAN NOT NULL, 
	status TEXT NOT NULL, 
	finish_reason TEXT, 
	error TEXT, 
	intended_s DOUBLE NOT NULL, 
	sent_s DOUBLE, 
	arrived_s DOUBLE, 
	admitted_s DOUBLE, 
	first_token_s DOUBLE, 
	finished_s DOUBLE, 
	queue_ms DOUBLE, 
	ttft_ms DOUBLE, 
	latency_ms DOUBLE, 
	compute_ms DOUBLE, 
	transfer_ms DOUBLE, 
	prompt_tokens INTEGER, 
	output_tokens INTEGER NOT NULL, 
	history_tokens INTEGER, 
	gpu_hit_tokens INTEGER, 
	cpu_hit_tokens INTEGER, 
	recomputed_tokens INTEGER, 
	shared_hit_tokens INTEGER, 
	new_tokens INTEGER, 
	resumed_swapped_tokens INTEGER NOT NULL, 
	resumed_recomputed_tokens INTEGER NOT NULL, 
	cpu_recomputed_tokens INTEGER NOT NULL, 
	h2d_bytes BIGINT NOT NULL, 
	d2h_bytes BIGINT NOT NULL, 
	sent_bytes BIGINT NOT NULL, 
	received_bytes BIGINT NOT NULL, 
	output_sha256 TEXT, 
	CONSTRAINT pk_turn PRIMARY KEY (id), 
	CONSTRAINT fk_turn_trial_id_trial FOREIGN KEY(trial_id) REFERENCES trial (id) ON DELETE CASCADE
);
INSERT INTO "turn" VALUES(1,1,0,'a',1,0,'','chat',1,'completed',NULL,NULL,0.0,NULL,NULL,NULL,NULL,NULL,NULL,12.5,NULL,NULL,NULL,NULL,2,64,32,NULL,NULL,NULL,NULL,0,0,0,0,0,0,0,NULL);
INSERT INTO "turn" VALUES(2,1,1,'b',1,0,'','chat',0,'timeout',NULL,NULL,0.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,2,NULL,NULL,NULL,NULL,NULL,NULL,0,0,0,0,0,0,0,NULL);
CREATE INDEX ix_trial_config_hash ON trial (config_hash);
CREATE UNIQUE INDEX uq_trial_fingerprint_running ON trial (fingerprint) WHERE status = 'running';
CREATE INDEX ix_sweep_trial_trial_id ON sweep_trial (trial_id);
CREATE INDEX ix_turn_trial_id ON turn (trial_id);
CREATE INDEX ix_sample_trial_id ON sample (trial_id);
CREATE VIEW current_trial AS SELECT t.id, t.fingerprint, t.config_hash, t.code_hash, t.platform, t.attempt, t.experiment, t.model, t.baseline, t.eviction, t.scheduler, t.cache, t.workload, t.hardware, t.seed, t.repeat, t.weights, t.model_revision, t.dtype, t.device, t.device_count, t.simulated, t.contended, t.gpu_tokens, t.cpu_tokens, t.gpu_bytes, t.cpu_bytes, t.kv_bytes_per_token, t.working_set_tokens, t.measure_start_s, t.measure_end_s, t.status, t.error, t.traceback, t.host, t.pid, t.process_started_at, t.heartbeat_at, t.started_at, t.finished_at, t.git_commit, t.mlflow_run_id, t.config, t.environment, t.engine, t.flags FROM trial t WHERE t.status = 'completed' AND t.attempt = (SELECT MAX(u.attempt) FROM trial u WHERE u.fingerprint = t.fingerprint AND u.status = 'completed');
COMMIT;
