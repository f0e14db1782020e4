-- The service role of koldproxy, without superuser as `koldproxy init` makes it, and an application with its database.
CREATE ROLE koldproxy LOGIN REPLICATION PASSWORD 'koldproxy';
CREATE ROLE koldproxy_eval NOLOGIN;
CREATE ROLE app LOGIN PASSWORD 'app';
GRANT koldproxy_eval, app TO koldproxy;
CREATE DATABASE app OWNER app;
GRANT CREATE ON DATABASE app TO koldproxy;
