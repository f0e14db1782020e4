-- The service role of koldproxy and an application with its database.
CREATE ROLE koldproxy LOGIN SUPERUSER REPLICATION PASSWORD 'koldproxy';
CREATE ROLE app LOGIN PASSWORD 'app';
CREATE DATABASE app OWNER app;
