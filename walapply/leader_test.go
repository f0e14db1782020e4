package walapply_test

const childDSN = "KOLDPROXY_WALAPPLY_CHILD_DSN"

func runChild(string) {}
