// Package migrations installs and removes koldproxy's catalog: the schema koldstore of a user's database, with its tables,
// its SQL functions, its publication and, where the role may create them, its event triggers.
//
// The steps are plain SQL in sql/, numbered, each with its way back under the line "create above / drop below". [Up] brings
// a database to the newest step, [Down] to any older one (0 removes everything, streams and mirrors included), [Status] says
// where it stands. Each step is one transaction, and only one process at a time migrates a database: an advisory lock makes
// the others wait.
//
// The SQL is the contract with applications; what the functions promise is written at each of them.
package migrations
