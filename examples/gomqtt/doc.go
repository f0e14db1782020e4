// Command gomqtt follows a stream for ever: it reads the log through koldproxy and lets MQTT messages wake it.
//
//	DATABASE_URL=postgres://… MQTT_URL=tcp://user:password@127.0.0.1:1883 gomqtt '$stream/<db>/<name>' LOG POSITION_FILE
//
// The order matters: it subscribes first and reads the log then, so that nothing falls between the two. A message says only that
// there is something to read; one that is lost is made good by looking every few seconds.
package main
