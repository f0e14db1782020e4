// Package migrations installs and removes koldproxy's catalog: the schema koldstore of a user's database, with its tables,
// its SQL functions, its publication and, where the role may create them, its event triggers.
//
// The steps are plain SQL in sql/, numbered, each with its way back under the line "create above / drop below". [Up] brings
// a database to the newest step, [Down] to any older one (0 removes everything, streams and mirrors included), [Status] says
// where it stands. Each step is one transaction, and only one process at a time migrates a database: an advisory lock makes
// the others wait.
//
// # Beside the previous binary
//
// From release 0.1.0 on every step must leave the binary of the release before it working, applying and answering demands included:
// instances are replaced one after the other, and the first new one brings the catalog up under the others. So a step adds. It
// does not drop, rename or retype what an older binary names (tables, columns, functions with their arguments and results, settings,
// kinds of demands), does not make it mandatory to write what an older binary does not know, and does not change how answers are
// sealed. What has to go, goes two releases after it was last used. A step that is released is never edited; what is wrong with it is put
// right by a later one: TestUpDownUp compares what each step leaves with what was there before it. Those of 0.1.0 are one story each, and
// were written anew for it: a catalog of a development version from before is refused.
//
// The SQL is the contract with applications; what the functions promise is written at each of them.
package migrations
